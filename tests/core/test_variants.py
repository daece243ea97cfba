"""Comparisons: the verdict is the figures', and what is missing is said."""

import pytest

from pipedream.core.variants import ACCUMULATING, DDP, ONE_WORKER, OverLink, RecipeComparison, Variant


def over(rate: float | None, **rates: float | None) -> OverLink:
    """A link with variants and their samples per second."""
    names = {"one_worker": ONE_WORKER, "ddp": DDP, "ours": "PipeDream, noam", "accumulating": ACCUMULATING}
    variants = tuple(
        Variant(names[name], 2, samples_per_s=value, why="" if value else "it has none")
        for name, value in rates.items()
    )
    return OverLink(() if rate is None else (rate,), variants)


@pytest.mark.parametrize(
    ("link", "words"),
    [
        (over(50e6, one_worker=30, ddp=10, ours=42), "over 400 Mbit/s PipeDream, noam trains 4.2 times as many samples "
         "per second as DDP, 1.4 times as fast as one worker"),
        (over(50e6, one_worker=40, ours=30, accumulating=54), "over 400 Mbit/s use DDP, accumulating 8, 1.3 times "
         "as fast as one worker"),
        (over(1.25e9, ddp=60, ours=42), "over 10 Gbit/s use DDP"),
        (over(1.25e9, ddp=60, accumulating=61, ours=42), "over 10 Gbit/s use DDP, accumulating 8"),
        (over(12.5e6, one_worker=50, ddp=4, ours=42), "over 100 Mbit/s one worker alone is the fastest"),
        (over(None, ddp=None, ours=42), "over this machine's own links PipeDream, noam is the fastest"),
        (over(50e6, ddp=None, ours=None), "over 400 Mbit/s nothing ran"),
    ],
)  # fmt: skip
def test_verdict_of_a_link(link: OverLink, words: str) -> None:
    assert link.verdict() == words


def test_an_approximate_answer_has_an_exact_one_beside_it() -> None:
    link = over(50e6, one_worker=30, ddp=10, ours=42)
    fast = Variant("data parallel, powersgd:4", 2, samples_per_s=60.0, approximation="sums=powersgd:4")
    assert OverLink(link.bytes_per_s, (*link.variants, fast)).verdict() == (
        "over 400 Mbit/s data parallel, powersgd:4 trains 6.0 times as many samples per second as DDP, 2.0 times as "
        "fast as one worker (approximate: sums=powersgd:4); with exact gradients PipeDream, noam trains 4.2 times as "
        "many samples per second as DDP, 1.4 times as fast as one worker"
    )


def test_verdict_is_one_sentence() -> None:
    links = over(1.25e9, ddp=60, ours=42), over(50e6, ddp=10, ours=42), over(25e6, ddp=10, ours=88)
    assert RecipeComparison("vgg", 2, None, links).verdict == (
        "Over 10 Gbit/s use DDP; over 400 Mbit/s PipeDream, noam trains 4.2 times as many samples per second as DDP; "
        "over 200 Mbit/s PipeDream, noam trains 8.8 times."
    )


def test_emulated_workers_are_said_to_be() -> None:
    comparison = RecipeComparison("vgg", 8, None, (over(50e6, ddp=10, ours=42),), emulated=True)
    assert comparison.verdict == (
        "With emulated workers over 400 Mbit/s PipeDream, noam trains 4.2 times as many samples per second as DDP."
    )
    assert str(comparison).startswith("vgg, 8 emulated workers, over 400 Mbit/s\n")


def test_table_says_what_is_missing() -> None:
    link = OverLink(
        (1.25e9, 50e6),
        (
            Variant(DDP, 2, samples_per_s=10.0, metrics={"accuracy": 0.5}, samples_per_update=64, bytes_per_sample=2e6),
            Variant("torch Schedule1F1B", 2, why="the model is no chain"),
            Variant("2BW", 2, "1-1, noam", 20.0, 21.0, 32, 1e5, 0.125, 3_000_000, 7.5, {"accuracy": 0.25}),
        ),
    )
    comparison = RecipeComparison("net", 2, None, (link,), ("the profile's seconds vary by 40%",))
    head, ddp, torchs, two_bw = (line.split("  ") for line in str(comparison).split("\n\n")[0].splitlines()[1:])
    words = [[cell.strip() for cell in row if cell.strip()] for row in (head, ddp, torchs, two_bw)]
    assert words[0] == list(comparison.heads)
    assert words[1] == ["DDP", "-", "10", "-", "-", "1.00", "64", "2.00 MB", "-", "-", "-", "0.5"]
    assert words[2] == ["torch Schedule1F1B", *["-"] * 11]
    assert words[3] == ["2BW", "1-1, noam", "20", "21", "-", "2.00", "32", "100 kB", "12.5%", "3.00 MB", "7.5", "0.25"]
    assert "over 10 Gbit/s, 400 Mbit/s\n" in str(comparison)
    assert comparison.reasons() == (
        "torch Schedule1F1B did not run: the model is no chain",
        'no seconds to a target: the recipe has none; give it one, as in target=("accuracy", 0.97)',
        "the profile's seconds vary by 40%",
    )
    assert RecipeComparison("net", 2, ("accuracy", 0.9), (link,)).reasons() == comparison.reasons()[:1]
