"""What papers and later studies say of asynchronous pipeline training, as comparisons of arms."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Effect:
    """Something published.

    Attributes:
        says: in words.
        source: where.
        published: figures, of the better and of the worse; empty where none are known for certain.
        task: on which it is looked for.
        better, worse: arms.
        even: that they are alike.
    """

    says: str
    source: str
    published: str
    task: str
    better: str
    worse: str
    even: bool = False


DIGITS, GPT = "digits", "char_gpt"
JUNG = "Jung et al., ICML 2026"
KOSSON, YANG, AJANTHAN = "Kosson et al., MLSys 2021", "PipeMare, MLSys 2021", "Ajanthan et al., ICML 2025"

EFFECTS = (
    Effect(
        "late gradients, taken at stashed weights, train as well as synchronous ones",
        "PipeDream, SOSP 2019",
        "the same accuracy in as many epochs",
        DIGITS, "pipedream", "sync", even=True,
    ),
    Effect("without a stash it is worse", "PipeDream, section 3.3", "", DIGITS, "pipedream", "naive"),
    Effect(
        "a transformer trains worse, stashed or not",
        "PipeMare's comparison, as a later study gives it",
        "BLEU 27.5 to 0.0",
        GPT, "sync", "pipedream",
    ),
    Effect(
        "old activations at new weights are worse than true gradients there",
        "a reproduction of TiMePReSt",
        "diverges at high rates",
        DIGITS, "naive_recompute", "naive",
    ),
    Effect(
        "vertical sync hurts",
        "the same reproduction",
        "CIFAR-100, three rates: 31.8, 35.1, 35.8 to 14.8, 26.6, 31.2",
        DIGITS, "pipedream", "vertical_sync",
    ),
    Effect("one update of delay costs nothing", "PipeDream-2BW, ICML 2021", "", DIGITS, "2bw", "sync", even=True),
    Effect(
        "nor with Adam",
        "PipeDream-2BW, ICML 2021",
        "WikiText-103 perplexity 19.56 and 19.28",
        GPT, "2bw", "sync", even=True,
    ),
    Effect(
        "one update of delay hurts AdamW",
        "One-Step Gradient Delay",
        "360M: loss 2.612 to 2.890",
        GPT, "sync", "2bw",
    ),
    Effect("error feedback repairs it", "One-Step Gradient Delay", "2.640 to 2.890", GPT, "2bw_ef", "2bw"),
    Effect(
        "with Muon one update of delay hurts little",
        "One-Step Gradient Delay",
        "2.590 and 2.578",
        GPT, "2bw_muon", "sync_muon", even=True,
    ),
    Effect(
        "error feedback helps Muon too",
        "One-Step Gradient Delay",
        "2.583 to 2.590",
        GPT, "2bw_ef_muon", "2bw_muon",
    ),
    Effect(
        "one update of delay everywhere is better than PipeDream's delays",
        "One-Step Gradient Delay",
        "PipeDream collapses at 16 stages",
        GPT, "2bw", "pipedream",
    ),
    Effect("pipelined backpropagation alone is worse than synchronous SGD", KOSSON, "", DIGITS, "sync", "pb"),
    Effect("linear weight prediction helps it", KOSSON, "", DIGITS, "pb_lwp", "pb"),
    Effect("spike compensation helps it", KOSSON, "", DIGITS, "pb_sc", "pb"),
    Effect("both together are better than one", KOSSON, "", DIGITS, "pb_lwp_sc", "pb_lwp"),
    Effect("both together close the gap", KOSSON, "", DIGITS, "pb_lwp_sc", "sync", even=True),
    Effect("T1 helps", YANG, "", DIGITS, "pipemare_t1", "pb"),
    Effect("T2 helps beside T1", YANG, "", DIGITS, "pipemare_t1_t2", "pipemare_t1"),
    Effect(
        "a transformer needs T3",
        "PipeMare, as a later study gives it",
        "BLEU 34.5 to 34.1",
        GPT, "pipemare_t1_t2_t3", "pipemare_t1_t2",
    ),
    Effect(
        "a synchronous finish repairs what late gradients did",
        "Zhang and Abdelrahman, 2021",
        "ResNet-362: 93.98 to 90.53 (synchronous 93.46)",
        DIGITS, "hybrid", "pb",
    ),
    Effect(
        "SpecTrain's prediction helps",
        "Chen et al., SpecTrain, 2018",
        "VGG, 2 stages: 91.05 to 90.86",
        DIGITS, "spectrain", "pipedream",
    ),
    Effect("PipeOptim's prediction helps", "Guan et al., PipeOptim, 2023", "", GPT, "pipeoptim", "pipedream"),
    Effect("Nesterov momentum helps PipeDream", AJANTHAN, "", DIGITS, "nesterov", "pipedream"),
    Effect("NAdam with long momentum helps PipeDream", AJANTHAN, "", GPT, "nesterov", "pipedream"),
    Effect(
        "basis rotation keeps late gradients useful",
        JUNG,
        "32 stages, 3B: 81.7% fewer updates to the same loss",
        GPT, "rotation", "pipedream",
    ),
    Effect("and makes up for the delay", JUNG, "", GPT, "rotation", "sync", even=True),
    Effect("and for one update of delay", JUNG, "", GPT, "2bw_rotation", "sync", even=True),
    Effect(
        "an update every p microbatches makes up for having no stash",
        "PACI, 2026",
        "GPT-2, 8 stages: perplexity 15.483 and 15.480",
        DIGITS, "paci", "sync", even=True,
    ),
)  # fmt: skip
