"""Misspelled flags of SGLang and smg are found without starting them; tests/integration compares with SGLang itself."""

from __future__ import annotations

import pytest

from miles_async.engines.sglang.known_flags import refused_flags, sglang_flags, smg_flags, unknown_flags
from miles_async.engines.sglang.locks import lock
from miles_async.errors import ConfigurationError
from tests.fakes.keys import KEYS


@pytest.mark.parametrize(
    "word",
    ["--mem-fraction-static", "--mem-fraction-static=0.3", "--tp-size", "--tensor-parallel-size",
     "--disable-cuda-graph", "--no-enable-fused-qk-norm-rope", "0.3", "-1"],
)  # fmt: skip
def test_flags_that_sglang_knows_pass(word: str):
    assert not list(unknown_flags([word], sglang_flags(), "--sglang-"))


def test_unknown_flags_are_named_as_the_user_wrote_them():
    [problem] = unknown_flags(["--mem-fraction-statik", "0.3", "--tp-size=2"], sglang_flags(), "--sglang-")
    assert problem.startswith("--sglang-mem-fraction-statik is passed on as --mem-fraction-statik, which the installed")
    assert problem.endswith("did you mean --sglang-mem-fraction-static?")
    [problem] = unknown_flags(["--quux=1"], sglang_flags(), "--sglang-")
    assert "did you mean" not in problem


def test_an_abbreviation_is_answered_with_the_full_flags():
    [problem] = unknown_flags(["--mem-fraction", "0.3"], sglang_flags(), "--sglang-")
    assert problem.startswith("--sglang-mem-fraction is passed on as --mem-fraction, which the installed version")
    assert problem.endswith("did you mean --sglang-mem-fraction-static?")
    [problem] = unknown_flags(["--b=1"], {"--b1", "--b2", "--b3", "--b4", "--c"}, "--sglang-")
    assert problem.endswith("did you mean --sglang-b1 or --sglang-b2 or --sglang-b3?")


@pytest.mark.parametrize("word", ["--incremental-streaming-output", "--incremental-streaming-output=true"])
def test_a_flag_that_changes_what_events_have_is_refused(word: str):
    assert not list(unknown_flags([word], sglang_flags(), "--sglang-"))
    [problem] = refused_flags(["--tp-size=2", word], "--sglang-")
    assert problem.startswith("--sglang-incremental-streaming-output: streams of the session server read all tokens")
    assert not list(refused_flags(["--stream-interval", "4", "--no-incremental-streaming-output"], "--sglang-"))


def test_ranks_that_compute_together_pause_together():
    [problem] = refused_flags(["--attn-dp-size=2", "--enable-dp-attention-local-control-broadcast"], "--sglang-")
    assert problem.startswith("--sglang-enable-dp-attention-local-control-broadcast: ranks would pause at different")


@pytest.mark.parametrize("words", [["--dp-size", "2"], ["--data-parallel-size=2"]])
def test_an_engine_is_one_replica(words: list[str]):
    [problem] = refused_flags(words, "--sglang-")
    assert (
        "SGLang updates no engine that has several replicas: the run takes more engines instead; leave it out"
        in problem
    )
    assert not list(refused_flags([*words, "--enable-dp-attention"], "--sglang-"))


@pytest.mark.parametrize(
    "words",
    [["--tokenizer-worker-num", "4"], ["--tokenizer-worker-num=4"], ["--grpc-port=1"], ["--grpc-mode"],
     ["--smg-grpc-mode"], ["--encoder-only"], ["--remote-instance-weight-loader-start-seed-via-transfer-engine"]],
)  # fmt: skip
def test_an_engine_has_no_door_without_the_runs_keys(words: list[str]):
    # covers: C13
    assert not list(unknown_flags(words, sglang_flags(), "--sglang-"))
    [problem] = refused_flags(["--tp-size=2", *words], "--sglang-")
    assert "without the run's keys; leave it out" in problem


@pytest.mark.parametrize("words", [["--tokenizer-worker-num", "1"], ["--tokenizer-worker-num=1"]])
def test_the_process_that_has_the_locks_may_be_asked_for(words: list[str]):
    assert not list(refused_flags(words, "--sglang-"))


@pytest.mark.parametrize("variable", ["SGLANG_GRPC_PORT", "SGLANG_RUST_SERVER"])
def test_no_variable_opens_a_door(variable: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(variable, "1")
    with pytest.raises(ConfigurationError, match=f"^{variable}: SGLang serves without the run's keys then; unset it"):
        lock(KEYS.engines)


def test_flags_in_a_file_of_sglangs_are_refused():
    [problem] = refused_flags(["--config", "engine.yaml"], "[groups.big.sglang] ")
    assert problem.startswith("[groups.big.sglang] config: flags in a file are not checked, so write them here")


def test_fields_without_a_flag_are_none():
    assert not any(flag.startswith("---") for flag in sglang_flags())


def test_smg():
    assert not list(unknown_flags(["--policy", "round_robin"], smg_flags(), "--router-"))
    assert not any(flag.endswith("-") for flag in smg_flags())
    [problem] = unknown_flags(["--polic", "random"], smg_flags(), "--router-")
    assert problem.endswith("did you mean --router-policy?")
    [problem] = unknown_flags(["--polizy=x"], smg_flags(), "--router-")
    assert "did you mean --router-policy?" in problem


def test_where_the_program_is_not_installed_nothing_is_refused():
    assert not list(unknown_flags(["--quux"], frozenset(), "--sglang-"))
