"""A user error is one line, whatever goes into it, and survives the way back from a worker process."""

from __future__ import annotations

import copy
import pickle

from depthprobe.errors import UserError


def test_line_has_cause_place_and_remedy() -> None:
    error = UserError("row 3 has no answer", where="data.csv", remedy="fill the column `target_text`")
    assert str(error) == "row 3 has no answer (data.csv): fill the column `target_text`"


def test_parts_may_be_missing() -> None:
    assert str(UserError("no weights")) == "no weights"
    assert str(UserError("no weights", remedy="train first")) == "no weights: train first"
    assert str(UserError("no weights", where="runs/a")) == "no weights (runs/a)"


def test_line_breaks_of_other_libraries_do_not_get_through() -> None:
    assert str(UserError("cannot read:\n  bad\theader\r\n", where="a\nb")) == "cannot read: bad header (a b)"


def test_survives_a_process_boundary() -> None:
    error = UserError("cause", where="place", remedy="cure")
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert isinstance(twin, UserError)
        assert (twin.what, twin.where, twin.remedy) == ("cause", "place", "cure")
