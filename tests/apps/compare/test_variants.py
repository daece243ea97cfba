"""Comparisons: the verdict and the table are the figures', and what is missing is said."""

from dataclasses import replace

import pytest

from pipedream.apps.compare.variants import DDP, ONE_WORKER, RecipeComparison, Variant


def over(rate: float | None, **rates: float | None) -> tuple[Variant, ...]:
    """Variants over a link with their samples per second."""
    names = {"one_worker": ONE_WORKER, "ddp": DDP, "ours": "pipedream"}
    return tuple(
        Variant(names[name], rate, samples_per_s=value, why="" if value else "it has none")
        for name, value in rates.items()
    )


@pytest.mark.parametrize(
    ("variants", "words"),
    [
        (over(None, ddp=None, ours=42), "Over this machine's own links only pipedream ran."),
        (over(50e6, ddp=None, ours=None), "At 400 Mbit/s nothing ran."),
        (
            (*over(1.25e9, ddp=60), *over(25e6, one_worker=30, ddp=10, ours=88)),
            "At 10 Gbit/s DDP is the fastest; at 200 Mbit/s pipedream (2.9 times one worker, 8.8 times DDP) is the "
            "fastest.",
        ),
        (
            (*over(50e6, ddp=10, ours=42), Variant("fast", 50e6, samples_per_s=60.0, approximation="powersgd:4")),
            "At 400 Mbit/s fast (6.0 times DDP) is the fastest, without approximation pipedream (4.2 times DDP).",
        ),
    ],
)
def test_the_verdict_names_the_fastest(variants: tuple[Variant, ...], words: str) -> None:
    assert RecipeComparison("vgg", 2, variants).verdict == words


def test_other_work_is_named() -> None:
    compared = RecipeComparison("vgg", 2, (Variant(DDP, 50e6, slowness=1.05), Variant("late", 50e6, slowness=4.0)))
    (doubt,) = compared.doubts()
    assert doubt.startswith("speeds may be wrong: other work took 75% of a worker's cores in late at 400 Mbit/s; ")
    alone = replace(compared, variants=compared.variants[:1], notes=("of the profile",))
    assert alone.doubts() == ("of the profile",)


def test_seconds_until_the_loss_of_the_reference() -> None:
    """Losses fall by 1 an update of 5 samples, late ones by half of that; a mean is over a tenth of 100."""
    falling = tuple((5 * (i + 1), float(-i)) for i in range(100))
    reference = Variant("1f1b", 1.25e8, predicted_per_s=10.0, losses=falling)
    late = Variant("late", 1.25e8, predicted_per_s=40.0, losses=tuple((n, loss / 2) for n, loss in falling))
    compared = RecipeComparison("small", 4, (reference, late), delayed=True)
    assert compared.average_losses(reference)[:2] == [(5.0, -4.5), (5.5, -5.5)]
    assert compared.reach_reference(reference) == 100 * 5 / 10.0
    assert compared.reach_reference(late) is None
    verdict = "On 4 workers at 1 Gbit/s, 1f1b is predicted to be the first at its own loss, after 50.0 s."
    assert compared.verdict == verdict
    longer = replace(late, losses=tuple((5 * (i + 1), float(-i)) for i in range(150)))
    compared = replace(compared, variants=(reference, longer))
    assert compared.reach_reference(longer) == 100 * 5 / 40.0
    words = "late is predicted to be the first at the loss of 1f1b, after 12.5 s; 1f1b takes 50.0 s."
    assert compared.verdict.endswith(words)
    assert compared.table()[0][-1] == "s to 1f1b's loss"
    assert replace(compared, finished=False).verdict.startswith("Not all runs have finished: the same command")
    few = replace(compared, variants=(replace(reference, losses=falling[:99]), longer))
    assert few.verdict.startswith("99 updates without an evaluation do not decide; train more")


def test_evaluations_decide_and_not_training_losses() -> None:
    """The late run has the lower loss in training, by the luck of its last minibatches."""
    reference = Variant("1f1b", 1.25e8, predicted_per_s=10.0, losses=((5, 2.0),), test_losses=((5, 0.5), (10, 0.2)))
    late = Variant("late", 1.25e8, predicted_per_s=40.0, losses=((5, 0.1),), test_losses=((5, 0.9), (10, 0.4)))
    compared = RecipeComparison("small", 4, (reference, late), delayed=True)
    assert compared.verdict.endswith(", 1f1b is predicted to be the first at its own test loss, after 1.00 s.")
    better = replace(late, test_losses=(*late.test_losses, (20, 0.2)))
    compared = replace(compared, variants=(reference, better))
    assert compared.verdict.endswith("late is predicted to be the first at the test loss of 1f1b, after 500 ms; "
                                     "1f1b takes 1.00 s.")  # fmt: skip
    assert compared.table()[0][-1] == "s to 1f1b's test loss"
