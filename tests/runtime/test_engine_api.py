"""What users of the engine meet: refusals one by one, streams, texts and stop strings, options, the record."""

from __future__ import annotations

import json

import pytest
import torch

from depthprobe.errors import UserError
from depthprobe.halting import FixedDepth
from depthprobe.models import LoopedConfig
from depthprobe.runtime import Engine, Request, Sampling
from depthprobe.runtime.live import Text
from depthprobe.runtime.record import Recorder, read_lines, read_meta
from tests.runtime.helpers import VOCABULARY, random_model

CONFIG = LoopedConfig(
    vocab_size=VOCABULARY, hidden_size=16, intermediate_size=12, num_attention_heads=2, n_core=2, n_loops=4,
    initializer_range=0.25, max_position_embeddings=32,
)  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return random_model(CONFIG, 0)


class Letters:
    """A tokenizer of one letter per id; id 16 is half of a character."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) - 97 for c in text]}

    def decode(self, token_ids, **_options) -> str:
        raw = b"".join(b"\xc3" if i == 16 else b"\xa4" if i == 15 else bytes([97 + i]) for i in token_ids)
        return raw.decode("utf-8", errors="replace")


def test_what_cannot_be_served_is_refused_alone(model) -> None:
    engine = Engine(model, width=2, max_len=12, kv_pages=4 * 12)
    prompts = [
        [1, 2, 3],
        [],
        [VOCABULARY],
        [-1],
        [1] * 12,
        [True],
        Request((1, 2), Sampling(max_new_tokens=9), replay=(1,)),
        [4],
    ]
    done = engine.generate(prompts[:6] + [prompts[7]], Sampling(max_new_tokens=4))
    assert [one.finish_reason for one in done] == ["length", *["refused"] * 5, "length"]
    for one, words in zip(done[1:6], ("empty", "token 17", "token -1", "need 15 places", "token True"), strict=True):
        assert words in str(one.error) and "\n" not in str(one.error)
    with pytest.raises(UserError, match="replay"):
        engine.add(prompts[6])
    small = Engine(model, width=2, max_len=12, kv_pages=20)
    with pytest.raises(UserError, match="r0"):
        small.add(Request((1,) * 6))
    assert small.in_flight == 0 and small.generate([[1]], Sampling(max_new_tokens=2))[0].error is None
    with pytest.raises(UserError, match="own id"):
        engine.add(Request((1,), Sampling(max_new_tokens=2), id="a"))
        engine.add(Request((1,), Sampling(max_new_tokens=2), id="a"))


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_new_tokens", 0), ("max_new_tokens", 1.5), ("temperature", -1.0), ("temperature", float("nan")),
     ("top_p", 0.0), ("top_p", 1.1), ("seed", 2**64), ("stop", "text"), ("stop", ("",)), ("stop_tokens", ("a",)),
     ("logprobs", -1)],
)  # fmt: skip
def test_impossible_sampling_names_the_field(field, value) -> None:
    with pytest.raises(UserError, match=field):
        Sampling(**{field: value})


@pytest.mark.parametrize(
    ("options", "words"),
    [({"exit": "q:1.5"}, "q"), ({"exit": "nothing"}, "known"), ({"policy": "fast"}, "policy"),
     ({"kv": "flat"}, "ragged"), ({"exit": "q:0.5", "policy": "full"}, "policy"),
     ({"kv": "depth-indexed"}, "depth-indexed"), ({"width": 0}, "width"), ({"spare": -1}, "spare"),
     ({"prefill": "late"}, "prefill"), ({"exit": "act:0.1", "kv": "ragged"}, "state-copied"),
     ({"exit": "fixed:5"}, "5"), ({"tap": -1}, "tap"), ({"kv_pages": 0}, "kv_pages"),
     ({"coda_share": 2.0}, "coda_share")],
)  # fmt: skip
def test_options_that_cannot_be_honoured_are_refused(model, options, words) -> None:
    with pytest.raises(UserError, match=words) as error:
        Engine(model, **options)
    assert "\n" not in str(error.value)


def test_prefix_caching_is_refused_by_name(model) -> None:
    with pytest.raises(UserError, match="prefix_caching"):
        Engine(model, prefix_caching=True)
    with pytest.raises(UserError, match="speculative"):
        Engine(model, speculative=3)


def test_full_depth_equals_generate() -> None:
    for prelude, coda in ((0, 0), (1, 1)):
        config = LoopedConfig(**{**CONFIG.to_dict(), "n_prelude": prelude, "n_coda": coda})
        served = random_model(config, 3)
        prompts = [[1, 2, 3, 4], [5, 6, 7, 8]]
        expected = served.generate(torch.tensor(prompts), max_new_tokens=6, do_sample=False)[:, 4:].tolist()
        for policy, kv in (("full", "depth-indexed"), ("refill", "ragged")):
            done = Engine(served, exit="full", policy=policy, kv=kv, width=2).generate(
                prompts, Sampling(max_new_tokens=6)
            )
            assert [one.tokens for one in done] == expected
            assert all(depth == 4 for one in done for depth in one.exit_depths)


def test_a_replayed_run_leaves_where_it_was_told(model) -> None:
    first = Engine(model, exit="q:0.5", width=3).generate([[1, 2], [3]], Sampling(max_new_tokens=5))
    again = Engine(model, exit="replay", width=1).generate(
        [Request(one.prompt, Sampling(max_new_tokens=5), replay=tuple(one.exit_depths)) for one in first]
    )
    assert [one.tokens for one in again] == [one.tokens for one in first]
    assert [one.exit_depths for one in again] == [one.exit_depths for one in first]


def test_a_stream_gives_tokens_and_lets_go_of_its_pages(model) -> None:
    engine = Engine(model, width=2)
    whole = engine.generate([[1, 2]], Sampling(max_new_tokens=6))[0].tokens
    stream = engine.stream([1, 2], Sampling(max_new_tokens=6))
    assert [next(stream).token for _ in range(3)] == whole[:3]
    stream.close()
    assert engine.in_flight == 0 and engine.pool.free_core == engine.pool.n_core
    assert [event.token for event in engine.stream([1, 2], Sampling(max_new_tokens=6))] == whole


def test_logprobs_are_the_models_own(model) -> None:
    engine = Engine(model, exit="full", width=2)
    one = engine.generate([[1, 2, 3]], Sampling(max_new_tokens=2, temperature=2.0, seed=5, logprobs=3))[0]
    ids = torch.tensor([[1, 2, 3, *one.tokens[:-1]]])
    with torch.inference_mode():
        expected = model(ids).logits[0, 2:].log_softmax(-1)
    assert one.logprobs is not None and one.top is not None
    for row, token, logprob, top in zip(expected, one.tokens, one.logprobs, one.top, strict=True):
        assert logprob == pytest.approx(float(row[token]), abs=1e-5)
        assert [i for i, _ in top] == row.topk(3).indices.tolist()


def test_text_stops_and_holds_back_half_of_a_stop_string() -> None:
    text = Text(Letters(), ("cd", "xyz"))
    assert [text.add(i) for i in (0, 2)] == [("a", False), ("", False)]
    assert text.add(1) == ("cb", False)
    assert text.add(2) == ("", False)
    assert text.add(3) == ("", True)
    assert text.whole == "acb"
    halves = Text(Letters(), ())
    assert halves.add(16) == ("", False)
    assert halves.add(15) == ("ä", False)
    rest = Text(Letters(), ("abc",))
    rest.add(0)
    assert rest.rest() == "a" and rest.whole == "a"


def test_stop_strings_end_a_request(model) -> None:
    engine = Engine(model, tokenizer=Letters(), width=2)
    whole = engine.generate(["abc"], Sampling(max_new_tokens=8))[0]
    assert whole.text == Letters().decode(whole.tokens)
    stop = whole.text[3:5]
    cut = engine.generate(["abc"], Sampling(max_new_tokens=8, stop=(stop,)))[0]
    assert cut.text == whole.text[: whole.text.index(stop)] and cut.finish_reason == "stop"
    with pytest.raises(UserError, match="tokenizer"):
        Engine(model).add(Request((1,), Sampling(stop=("a",))))
    with pytest.raises(UserError, match="tokenizer"):
        Engine(model).generate(["abc"])[0]
        Engine(model).request("abc")


def test_the_record_says_what_happened(model, tmp_path) -> None:
    with Engine(
        model, exit="q:0.6,min=2", width=2, spare=1, record=tmp_path / "t", about={"model": "tiny"}, tap=2
    ) as engine:
        done = engine.generate([[1, 2, 3], [4], [5, 6]], Sampling(max_new_tokens=3))
        engine.add(Request((1, 2), id="cut"))
        engine.step()
        engine.abort("cut")
    about = read_meta(tmp_path / "t")
    assert (about["model"], about["exit"], about["kv"], about["n_loops"]) == ("tiny", "q:0.6,min=2", "ragged", 4)
    tokens = list(read_lines(tmp_path / "t", "tokens"))
    assert len(tokens) == 9
    for row in tokens:
        own = next(one for one in done if one.id == row["request"])
        assert own.tokens[row["index"]] == row["token"] and own.exit_depths[row["index"]] == row["exit"]
        assert len(row["lambda"]) == len(row["cdf"]) == len(row["criterion"]) == len(row["lens"]) == row["exit"]
        met = [i + 1 for i, value in enumerate(row["criterion"]) if value >= 0.6]
        assert row["selected"] == (met[0] if met else None)
        assert row["reason"] == ("cap" if not met else "rule" if met[0] >= 2 else "floor")
        assert row["run"] == row["exit"] and row["waited"] >= 0
    ticks = list(read_lines(tmp_path / "t", "ticks"))
    assert [row["tick"] for row in ticks] == list(range(len(ticks)))
    assert sum(sum(row["depths"]) for row in ticks) == sum(row["exit"] for row in tokens)
    ends = [row for row in read_lines(tmp_path / "t", "requests") if row["event"] == "end"]
    assert [row["finish_reason"] for row in ends] == ["length"] * 3 + ["aborted"]
    with pytest.raises(UserError, match="not empty"):
        Engine(model, record=tmp_path / "t")


def test_a_cut_line_is_left_out_and_segments_rotate(tmp_path) -> None:
    recorder = Recorder(tmp_path / "t", {}, segment_bytes=50, flush_s=0.0)
    for i in range(10):
        recorder.write("tokens", {"index": i, "text": "ä" * 10})
    recorder.close()
    files = sorted((tmp_path / "t").glob("tokens-*.jsonl"))
    assert len(files) > 1
    files[-1].write_bytes(files[-1].read_bytes() + b'{"index": 10, "te')
    assert [row["index"] for row in read_lines(tmp_path / "t", "tokens")] == list(range(10))
    files[0].write_text("{}\nnonsense\n")
    with pytest.raises(UserError, match="line 2"):
        list(read_lines(tmp_path / "t", "tokens"))
    (tmp_path / "t" / "trace.json").write_text(json.dumps({"trace_version": 99}))
    with pytest.raises(UserError, match="version 99"):
        read_meta(tmp_path / "t")
    with pytest.raises(UserError, match="no trace"):
        read_meta(tmp_path)


def test_lookahead_runs_ahead_and_says_so(model, tmp_path) -> None:
    engine = Engine(model, exit="lookahead:l2:0.5", width=2, record=tmp_path / "t")
    engine.generate([[1, 2], [3, 4], [5]], Sampling(max_new_tokens=4))
    engine.close()
    assert max(row["ahead"] for row in read_lines(tmp_path / "t", "ticks")) == 1
    least = min(row["exit"] for row in read_lines(tmp_path / "t", "tokens"))
    assert least >= 3  # an l2 rule first compares after loop 2
    assert FixedDepth(1).horizon == 0


def test_an_exception_in_a_tick_ends_its_requests_alone(model, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[1, 2, 3], [4, 5], [6], [7, 8]]
    sampling = Sampling(max_new_tokens=4)
    expected = Engine(model, exit="q:0.6", width=4).generate(prompts, sampling)
    for stage in ("prefill", "prelude", "recurrent", "coda"):
        for kv in ("ragged", "shared"):
            engine = Engine(model, exit="q:0.6", kv=kv, width=1, spare=2)
            names = [engine.add(Request(tuple(prompt), sampling)) for prompt in prompts]
            for _ in range(6):
                engine.step()
            plain = getattr(engine.runner, stage)

            def broken(*_args: object, **_options: object) -> None:
                raise MemoryError("no room")

            monkeypatch.setattr(engine.runner, stage, broken)
            with pytest.raises(MemoryError):
                engine.run()
            monkeypatch.setattr(engine.runner, stage, plain)
            engine.check_integrity()
            engine.run()
            done = [engine.take(name) for name in names]
            reasons = [one.finish_reason for one in done if one is not None]
            assert "error" in reasons and set(reasons) <= {"error", "length"}
            assert all("no room" in str(one.error) for one in done if one is not None and one.finish_reason == "error")
            if kv == "ragged":
                assert reasons.count("error") < len(prompts)
                for one, alone in zip(done, expected, strict=True):
                    assert one is None or one.finish_reason == "error" or one.tokens == alone.tokens
            assert engine.pool.free_core == engine.pool.n_core and engine.in_flight == 0
            again = engine.generate(prompts, sampling)
            assert kv != "ragged" or [one.tokens for one in again] == [one.tokens for one in expected]


def test_streams_side_by_side_have_all_of_their_tokens(model) -> None:
    engine = Engine(model, width=2)
    sampling = Sampling(max_new_tokens=5)
    expected = [one.tokens for one in engine.generate([[1, 2], [3]], sampling)]
    streams = [engine.stream([1, 2], sampling), engine.stream([3], sampling)]
    got: list[list[int]] = [[], []]
    for _ in range(5):
        for stream, tokens in zip(streams, got, strict=True):
            tokens.append(next(stream).token)
    assert got == expected


def test_a_model_that_breaks_ends_the_request_with_the_reason(tmp_path) -> None:
    broken = random_model(LoopedConfig(**{**CONFIG.to_dict(), "tie_word_embeddings": False}), 0)
    engine = Engine(broken, exit="fixed:2", width=2, record=tmp_path / "t")
    with torch.no_grad():
        broken.embed_tokens.weight[5] = torch.nan
    with pytest.raises(UserError, match="weights have changed"):
        engine.add(Request((1,)))
    engine = Engine(broken, exit="fixed:2", width=2, record=tmp_path / "u")
    done = engine.generate([[1, 5], [1, 2]], Sampling(max_new_tokens=1))
    assert [one.finish_reason for one in done] == ["error", "length"] and "not finite" in str(done[0].error)
    engine.close()
    assert [row["finish_reason"] for row in read_lines(tmp_path / "u", "requests") if row["event"] == "end"]


def test_what_is_told_of_a_request_stands_beside_the_records_own(model, tmp_path) -> None:
    engine = Engine(model, record=tmp_path / "t")
    for about, words in (({"event": "x"}, "record's own"), ({"x": {1, 2}}, "JSON")):
        with pytest.raises(UserError, match=words):
            engine.add(Request((1,), Sampling(max_new_tokens=1), about=about))
    assert engine.in_flight == 0 and engine.scheduler.idle
    import numpy as np

    done = engine.generate([np.array([1, 2]), torch.tensor([3]), 7, None, [1.5]], Sampling(max_new_tokens=1))
    assert [one.finish_reason for one in done] == ["length"] * 2 + ["refused"] * 3
    engine.close()


def test_an_abort_of_what_is_planned_ahead_gives_its_pages_back(model) -> None:
    engine = Engine(model, exit="lookahead:l2:0.5", width=2)
    name = engine.add(Request((1, 2), Sampling(max_new_tokens=4)))
    while not engine._planned:
        engine.step()
    engine.abort(name)
    engine.run()
    assert engine.pool.free_core == engine.pool.n_core
    engine.check_integrity()


def test_no_gates_on_record_is_no_reason(model, tmp_path) -> None:
    with Engine(model, exit="q:0.6", record_gates=False, record=tmp_path / "t") as engine:
        engine.generate([[1, 2]], Sampling(max_new_tokens=2))
    assert {row["reason"] for row in read_lines(tmp_path / "t", "tokens")} == {None}
