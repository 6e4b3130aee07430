"""Before anything is imported: kernels run interpreted, one thread a test, no test asks a hub for anything."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
# two OpenMP threads on tiny models are hundreds of times slower on a busy machine
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
