"""Durations by arithmetic, against the same arithmetic done by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from miles_async.simulation.distributions import Fixed, LogNormal
from miles_async.simulation.estimates import (
    Assumptions,
    Gpu,
    Job,
    Measured,
    Passes,
    Transport,
    assumptions,
    describe,
    estimate,
    publication,
)
from miles_async.train_data.work import ModelWork

GPU = Gpu(flops=1e12, bandwidth=1e9)
WORK = ModelWork(
    weights=1000,
    passed_weights=400,
    routed_weights=800,
    expert_share=0.25,
    attention_weights=100,
    embedding_weights=50,
    pair=2,
)
ASSUMED = Assumptions(mfu=0.5, decode_use=0.25, link=100.0, copy=50.0, files=40.0, cpu_per_sample=0.001)
LINKS = Transport(name="links", senders=2, loads_files=False, shares_files=False)
JOB = Job(
    samples=10,
    prompt_tokens=20,
    trainer_gpus=4,
    transport=LINKS,
    recompute=False,
    passes=Passes(training=1, scoring=0),
    engine_gpus=2,
    slots=3,
    caches=1,
    cache_tokens=None,
    bytes_per_weight=2,
    cache_per_token=8,
)
TOKENS = Fixed(80.0)


def test_training() -> None:
    flops = 2 * 10 * (100 * 400 + 100 * 100 / 2 * 2)  # of a forward pass over 10 sequences of 100 tokens
    assert estimate(JOB, WORK, GPU, TOKENS, ASSUMED).train_seconds == pytest.approx(3 * flops / (4 * 1e12 * 0.5))
    more = replace(JOB, recompute=True, passes=Passes(training=2, scoring=1.5))
    assert estimate(more, WORK, GPU, TOKENS, ASSUMED).train_seconds == pytest.approx(9.5 * flops / (4 * 1e12 * 0.5))


def test_weights_travel_from_all_senders_at_the_same_time() -> None:
    found = estimate(JOB, WORK, GPU, TOKENS, ASSUMED).publication
    assert (found.copy_seconds, found.bring_seconds, found.pause_seconds) == (2000 / 2 / 50, 0, 2000 / 2 / 100)


@pytest.mark.parametrize(
    ("transport", "copy", "bring"),
    [
        (Transport(name="brought", senders=2, loads_files=True, shares_files=False), 2000 / 2 / 50, 2000 / 2 / 100),
        (Transport(name="shared", senders=1, loads_files=True, shares_files=True), 2000 / 50, 2000 / 40),
        (Transport(name="changes", senders=1, loads_files=True, shares_files=True, sent=0.1), 2000 / 50, 200 / 40),
    ],
    ids=lambda value: value.name if isinstance(value, Transport) else "",
)
def test_engines_load_all_files_while_they_are_paused(transport: Transport, copy: float, bring: float) -> None:
    """The time to bring files depends on the senders, on links or the file system, and on the share that changed."""
    found = publication(transport, 2000, ASSUMED)
    assert (found.copy_seconds, found.bring_seconds) == pytest.approx((copy, bring))
    assert found.pause_seconds == 2000 / 40


def test_decoding_reads_weights_and_cache_once_per_token() -> None:
    touched = 400 + 800 * (1 - 0.75**3 - 0.25)  # 3 tokens choose a quarter of the experts each
    read = touched * 2 + 3 * (20 + 40) * 8  # on average, half of the response is in the cache
    found = estimate(JOB, WORK, GPU, TOKENS, ASSUMED)
    assert found.token_seconds == pytest.approx(read / (2 * 1e9 * 0.25))
    assert found.response == Fixed(80 * found.token_seconds)
    twice = estimate(replace(JOB, caches=2), WORK, GPU, TOKENS, ASSUMED)
    assert twice.token_seconds == pytest.approx((read + 100 * 2) / (2 * 1e9 * 0.25))  # attention's, beside each cache


def test_decoding_with_slow_arithmetic() -> None:
    slow = Gpu(flops=1e3, bandwidth=1e9)
    found = estimate(JOB, WORK, slow, TOKENS, ASSUMED)
    assert found.token_seconds == pytest.approx(2 * 3 * 400 / (2 * 1e3 * 0.5))


@pytest.mark.parametrize(("room", "slots"), [(None, 3), (179, 2), (180, 3), (10_000, 3), (10, 1)])
def test_the_cache_bounds_the_requests_of_an_engine(room: int | None, slots: int) -> None:
    assert estimate(replace(JOB, cache_tokens=room), WORK, GPU, TOKENS, ASSUMED).slots == slots


@pytest.mark.parametrize("loads_files", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_measured_durations_give_back_what_they_were_estimated_with(loads_files: bool, recompute: bool) -> None:
    """As ``--gpu report.json`` takes them from a run."""
    transport = replace(LINKS, loads_files=loads_files)
    job = replace(JOB, transport=transport, recompute=recompute, passes=Passes(training=2, scoring=1))
    durations = estimate(job, WORK, GPU, TOKENS, ASSUMED)
    seen = Measured(
        train_seconds=durations.train_seconds,
        sequence_tokens=100,
        token_seconds=durations.token_seconds,
        context=20 + 80 / 2,
        copy_seconds=durations.publication.copy_seconds,
        pause_seconds=durations.publication.pause_seconds,
    )
    sending = {"files": ASSUMED.files} if loads_files else {"link": ASSUMED.link}
    expected = {"mfu": ASSUMED.mfu, "decode_use": ASSUMED.decode_use, "copy": ASSUMED.copy, **sending}
    assert assumptions(job, WORK, GPU, seen) == pytest.approx(expected)


def test_lengths_keep_their_spread() -> None:
    found = estimate(JOB, WORK, GPU, LogNormal(80.0, 0.5, 160.0), ASSUMED)
    assert isinstance(found.response, LogNormal)
    assert found.response.median == pytest.approx(80 * found.token_seconds)
    assert found.response.longest == pytest.approx(160 * found.token_seconds)
    assert found.response.sigma == 0.5


def test_assumptions_are_told() -> None:
    text = describe(estimate(JOB, WORK, GPU, TOKENS, ASSUMED), [], ASSUMED)
    for told in ("Estimated, not measured", "50% of the GPU's", "25% of its memory's", "--mfu", "--link-gbytes"):
        assert told in text


def test_what_a_report_measured_leaves_whole_sentences_of_assumptions() -> None:
    told = describe(estimate(JOB, WORK, GPU, TOKENS, ASSUMED), [], ASSUMED, measured=("files",), origin="report.json")
    measured, _, assumed = told.partition("Measured in report.json: ")[2].partition("Assumed: ")
    assert measured == "files are written and loaded at 4e-08 GB/s by each sender and engine.\n"
    assert "5e-08 GB/s to host memory; files are no slower on a shared file system; of files 100% are sent" in assumed


def test_transports_are_compared() -> None:
    brought = Transport(name="brought", senders=1, loads_files=True, shares_files=False, sent=0.5)
    compared = [publication(transport, 2000, ASSUMED) for transport in (LINKS, brought)]
    text = describe(estimate(JOB, WORK, GPU, TOKENS, ASSUMED), compared, ASSUMED)
    rows = [line.split() for line in text.splitlines() if line.startswith(("links", "brought"))]
    assert rows == [["links", "(chosen)", "2", "20", "0", "10"], ["brought", "1", "40", "10", "50"]]
