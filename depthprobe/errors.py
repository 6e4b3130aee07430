"""Errors that are the user's to mend: one line that names the cause, the place and the remedy."""

from __future__ import annotations


class UserError(Exception):
    """Something a user can put right. The command line prints it as one line and exits with code 2.

    Args:
        what: the cause, in plain words, without a full stop.
        where: the file, row, field or option it was found in.
        remedy: what to do about it, best a command.

    `str(error)` is one line, "what (where): remedy", whatever line breaks the parts hold, so that a message
    taken over from another library cannot spread over the terminal.
    """

    def __init__(self, what: str, *, where: str | None = None, remedy: str | None = None) -> None:
        super().__init__(what, where, remedy)
        self.what = _one_line(what)
        self.where = _one_line(where) if where else None
        self.remedy = _one_line(remedy) if remedy else None

    def __str__(self) -> str:
        text = self.what if self.where is None else f"{self.what} ({self.where})"
        return text if self.remedy is None else f"{text}: {self.remedy}"

    def __reduce__(self) -> tuple[object, ...]:
        # the default reduction, by which worker processes hand errors back, loses keyword-only arguments
        return _rebuild, (type(self), self.what, self.where, self.remedy)


def _rebuild(kind: type[UserError], what: str, where: str | None, remedy: str | None) -> UserError:
    return kind(what, where=where, remedy=remedy)


def _one_line(text: str) -> str:
    return " ".join(str(text).split())
