"""What stale gradients cost in accuracy, and the compensation with which they cost least.

Medians of five seeds of small tasks, with the learning rate tuned for each, beyond synchronous training with the same
optimizer (benchmarks/convergence): nats per character for a GPT, percentage points of error for handwritten digits.
"""

from bisect import bisect_left

_ADAM, _NADAM, _MUON, _SGD = "AdamW", "NAdam of beta_1 0.99", "Muon", "momentum SGD"

_STAGES = (2, 4, 8)
_UNITS = {**dict.fromkeys((_ADAM, _NADAM, _MUON), "nats per character"), _SGD: "points of error"}
_COSTS: dict[tuple[str, str], dict[str, tuple[float, float, float]]] = {
    ("pipedream", _ADAM): {"": (0.06, 0.18, 0.37), "basis_rotation": (-0.09, 0.0, 0.14)},
    ("pipedream", _NADAM): {"": (0.0, 0.07, 0.22), "basis_rotation": (-0.12, -0.06, 0.05)},
    ("pipedream", _MUON): {"": (0.09, 0.18, 0.24), "error_feedback": (0.03, 0.11, 0.20)},
    ("pipedream", _SGD): {"": (0.4, 1.6, 3.8), "nesterov": (-0.6, 0.1, 3.8)},
    ("pipedream_2bw", _ADAM): {
        "": (0.12, 0.12, 0.12),
        "error_feedback": (0.05, 0.05, 0.05),
        "basis_rotation": (-0.05, -0.05, -0.05),
    },
    ("pipedream_2bw", _MUON): {"": (0.12, 0.12, 0.12), "error_feedback": (0.06, 0.06, 0.06)},
    ("pipedream_2bw", _SGD): {"": (0.3, 0.3, 0.3)},
}
"""Method and optimizer -> compensation -> the cost at each of `_STAGES`."""


def describe_delay_cost(method: str, stages: int, compensation: str = "") -> str:
    """Describes the cost of stale gradients at the next measured number of stages; '' where nothing was measured.

    Args:
        compensation: name of the one in use.
    """
    if stages == 1:
        return ""
    column, parts = bisect_left(_STAGES[:-1], stages), []
    for optimizer in _UNITS:
        costs = {name: by_stages[column] for name, by_stages in _COSTS.get((method, optimizer), {}).items()}
        if compensation not in costs:
            continue
        best = min(costs, key=lambda name: costs[name])
        better = f" ({costs[best]:+.2f} with compensation {best})" if costs[best] < costs[compensation] else ""
        parts.append(f"{costs[compensation]:+.2f} {_UNITS[optimizer]} with {optimizer}{better}")
    measured = f"stale gradients in small tests with {_STAGES[column]} stages, compared with synchronous training"
    return f"{measured}: {'; '.join(parts)}" if parts else ""
