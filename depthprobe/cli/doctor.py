"""`depthprobe doctor`: what is installed, what is missing, and the command that brings it.

It must answer on a machine where anything may be missing: at its top it imports neither rich nor torch, and a
package that cannot be imported is a finding, not an error.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import platform
import shutil
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

import depthprobe

CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked for.

    state: "ok"; "missing", which an extra or a test needs; or "broken", which all of depthprobe needs.
    brings: the command that puts it right, for the last two.
    """

    group: str
    name: str
    state: str
    detail: str
    brings: str | None = None


def command(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Say what is installed, what is missing, and the command that brings it.

    Exits with 1 if a part is missing without which depthprobe does not work.
    """
    findings = examine()
    broken = any(f.state == "broken" for f in findings)
    if as_json:
        missing = [f.name for f in findings if f.state != "ok"]
        rows = [asdict(f) for f in findings]
        typer.echo(json.dumps({"ok": not broken, "missing": missing, "findings": rows}, indent=2))
    else:
        for line in _as_text(findings):
            typer.echo(line)
    if broken:
        raise typer.Exit(1)


def examine() -> list[Finding]:
    """Look at everything, in the order in which it is shown."""
    return [*_versions(), *_packages(), *_devices(), *_models(), _chromium()]


def find_chromium() -> str | None:
    """The path of a Chromium to draw and test reports with; `$CHROMIUM` goes before what is on the PATH."""
    for name in (os.environ.get("CHROMIUM"), *CHROMIUM_NAMES):
        if name and (path := shutil.which(name)):
            return path
    return None


def _versions() -> Iterator[Finding]:
    yield Finding("system", "depthprobe", "ok", f"{depthprobe.__version__} in {_package_folder()}")
    yield Finding("system", "python", "ok", f"{platform.python_version()} in {sys.prefix}")
    yield Finding("system", "platform", "ok", f"{platform.system()} {platform.machine()}")


def _packages() -> Iterator[Finding]:
    for name, specifier, extra in requirements():
        group = f"extra: {extra}" if extra else "core"
        state = "missing" if extra else "broken"
        wanted = f"{name}{specifier}"
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            detail = f"not installed (wanted {specifier})"
            yield Finding(group, name, state, detail, f"pip install '{wanted}'")
            continue
        if _satisfies(version, specifier):
            yield Finding(group, name, "ok", version)
        else:
            yield Finding(group, name, state, f"{version} (wanted {specifier})", f"pip install '{wanted}'")


def requirements() -> list[tuple[str, str, str | None]]:
    """(package, version range, extra or None for the core) of what depthprobe declares, for this platform."""
    try:
        from packaging.requirements import Requirement
    except ModuleNotFoundError:
        # packaging comes with transformers; without it the core is certainly not installed
        return [("packaging", ">=23", None), ("transformers", ">=5.10", None)]
    found: list[tuple[str, str, str | None]] = []
    for text, extra in _declared():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra or ""}):
            found.append((requirement.name, str(requirement.specifier), extra))
    return [row for row in found if row[0] != "depthprobe"]  # `all` names the other extras


def _declared() -> Iterator[tuple[str, str | None]]:
    """Requirement strings with their extra: of the checkout if this is one, else of the installed package."""
    checkout = _package_folder().parent / "pyproject.toml"
    if checkout.is_file() and (project := _project(checkout)).get("name") == "depthprobe":
        yield from ((text, None) for text in project["dependencies"])
        for extra, texts in project["optional-dependencies"].items():
            yield from ((text, extra) for text in texts)
        return
    for text in importlib.metadata.requires("depthprobe") or []:
        _, _, marker = text.partition("extra ==")
        yield text, marker.strip().strip("\"'") or None


def _project(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text("utf-8")).get("project", {})


def _package_folder() -> Path:
    return Path(depthprobe.__file__).parent


def _satisfies(version: str, specifier: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(specifier).contains(version, prereleases=True)


def _devices() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    omp = os.environ.get("OMP_NUM_THREADS")
    try:
        torch: Any = importlib.import_module("torch")
    except Exception as error:  # a torch that is there and does not load is the most useful finding of all
        detail = f"torch does not load: {' '.join(str(error).split())[:200]}"
        yield Finding("devices", "cpu", "broken", detail, "pip install --force-reinstall torch")
        return
    threads = f"torch uses {torch.get_num_threads()} threads, OMP_NUM_THREADS={omp or 'unset'}"
    yield Finding("devices", "cpu", "ok", f"{cores} cores, {threads}")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            size = properties.total_memory / 2**30
            yield Finding("devices", f"cuda:{index}", "ok", f"{properties.name}, {size:.0f} GiB")
    elif torch.backends.mps.is_available():
        yield Finding("devices", "mps", "ok", "Apple GPU")
    else:
        yield Finding("devices", "gpu", "ok", "none: models run on the CPU")


def _models() -> Iterator[Finding]:
    folder = _package_folder() / "models" / "embedded"
    names = sorted(p.parent.name for p in folder.glob("*/model.safetensors"))
    for name in names:
        size = (folder / name / "model.safetensors").stat().st_size / 2**20
        yield Finding("models", name, "ok", f"embedded, {size:.1f} MiB")
    if not names:
        detail = f"no weights in {folder}"
        train = f"depthprobe train follow-demo --out {folder / 'follow-demo'}"
        yield Finding("models", "follow-demo", "broken", detail, train)
    try:
        from depthprobe.models.smollm2 import INSTALL, cached_smollm2, find_gguf
    except ImportError as error:
        detail = f"cannot be looked for: {error}"
        yield Finding("models", "smollm2", "missing", detail, "pip install torch transformers")
        return
    if (copy := cached_smollm2()) is not None:
        yield Finding("models", "smollm2", "ok", f"converted copy in {copy}")
    elif find_gguf() is not None:
        convert = "python -m depthprobe.models.smollm2"
        yield Finding("models", "smollm2", "missing", "not converted yet", convert)
    else:
        yield Finding("models", "smollm2", "missing", "not on this machine", INSTALL)


def _chromium() -> Finding:
    if path := find_chromium():
        return Finding("browser", "chromium", "ok", path)
    return Finding("browser", "chromium", "missing", "browser tests skip", "apt-get install chromium")


def _as_text(findings: list[Finding]) -> Iterator[str]:
    colours = {"ok": typer.colors.GREEN, "missing": typer.colors.YELLOW, "broken": typer.colors.RED}
    width = max(len(f.name) for f in findings)
    group = None
    for f in findings:
        if f.group != group:
            group = f.group
            yield typer.style(group, bold=True)
        yield f"  {typer.style(f'{f.state:<7}', fg=colours[f.state])}  {f.name:<{width}}  {f.detail}"
        if f.brings:
            yield f"  {'':7}  {'':{width}}  -> {f.brings}"
    lacking = sum(f.state != "ok" for f in findings)
    yield f"{lacking} missing; the arrows name what brings it" if lacking else "nothing is missing"
