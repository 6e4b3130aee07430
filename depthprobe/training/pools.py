"""The stories of a training run, made in another process; those of later rungs while earlier ones are learned."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context, parent_process
from multiprocessing.process import BaseProcess

from depthprobe.errors import UserError
from depthprobe.tasks.generate import Generator
from depthprobe.training.family_tokenizer import family_tokenizer
from depthprobe.training.packing import Pool
from depthprobe.training.recipes import Recipe


class Pools:
    """The pool of every longest k, or one for all of them (`one_length`), made in a process of their own.

    That process is deaf to Ctrl-C, which is the trainer's to act on; it ends with `close`, or when the trainer is gone.
    """

    def __init__(self, recipe: Recipe, seed: int) -> None:
        self._one = recipe.longest if recipe.one_length else None
        self._maker = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_end_with_parent)
        self._made: dict[int, Future[Pool]] = {}
        self._processes: list[BaseProcess] = []
        others = active_children()
        try:
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the new process inherits it
            try:
                for longest in range(1, recipe.longest + 1) if self._one is None else [self._one]:
                    self._made[longest] = self._maker.submit(make_pool, longest, recipe, seed)
                self._processes = [child for child in active_children() if child not in others]
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        except BaseException:
            self.close()
            raise

    def __getitem__(self, longest: int) -> Pool:
        """The pool that has questions of up to `longest` hops, waited for where it is not made yet.

        Raises:
            UserError: the process that makes pools has ended before its time.
        """
        try:
            return self._made[self._one or longest].result()
        except BrokenProcessPool as error:
            raise UserError(
                "the process that makes the stories has ended",
                remedy="see that there is memory for it; a script calls `train` under `if __name__ == '__main__':`",
            ) from error

    def ready(self, longest: int) -> bool:
        """Whether `self[longest]` would come at once."""
        return self._made[self._one or longest].done()

    def close(self) -> None:
        """End the process at once, whatever it still has to make."""
        for process in self._processes:
            process.terminate()
        self._maker.shutdown(cancel_futures=True)


def make_pool(longest: int, recipe: Recipe, seed: int) -> Pool:
    """The training pool of one longest k: chains of the "train" split, in the default form and template.

    Where stories are of `one_length`, the longest k of all. Seeds of the generator are apart from analysis' default.
    """
    generator = Generator(recipe.task, hops=range(1, longest + 1), orders=recipe.order, split="train", seed=seed)
    return Pool(generator, family_tokenizer(), recipe.stories, recipe.questions, prefixes=recipe.task == "follow")


def _end_with_parent() -> None:
    """In the pools' process: leave when the trainer is gone, which may have had no time to say so."""
    trainer = parent_process()
    assert trainer is not None

    def watch() -> None:
        trainer.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
