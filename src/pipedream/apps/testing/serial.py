"""The serial rule: what a pipeline has to compute, in plain PyTorch, one microbatch after the other.

This is docs/exact_rules.md as a program. A pipeline does many things at once, but which weights each pass reads, and
which microbatches each update contains, are numbers that are known before it runs. So a loop can make the passes in
turn if it keeps the weights that each stage has had since the last drain. Of the library only the rule for seeds is
used. `pipedream.apps.testing.rules` has the letters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pipedream.apps.testing.batches import split_batch
from pipedream.apps.testing.passes import Passes
from pipedream.apps.testing.results import Trained
from pipedream.apps.testing.rules import MethodRules, Reducer, Values, copy_values
from pipedream.apps.testing.stages import Copy, Factory, Stage, average_buffers


@dataclass
class Loop:
    """Trains a model by the serial rule.

    Attributes:
        passes: the model, its stages, its loss.
        optimizer, scheduler: factories, of each stage.
        rules: minibatch -> the method that trains from there on.
        replicas: of each stage; () for 1.
        drains: minibatches before which each stage is at its newest weights, from which versions are counted.
        clip: greatest norm of an update's gradients.
        skips: an update whose gradients are not finite is skipped by all stages 'together', or by 'each' itself.
        ema: decay of an average of the weights.
        reducer: how replicas agree.
        watch: called with minibatches so far, the last one's loss, and the loop; says whether to go ahead.
        max_versions: how many of the newest versions of each stage are kept; by default all.
    """

    passes: Passes
    batches: Sequence[Any]
    optimizer: Factory
    rules: Mapping[int, MethodRules]
    replicas: Sequence[int] = ()
    drains: Sequence[int] = ()
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    clip: float | None = None
    skips: str = ""
    ema: float | None = None
    reducer: Reducer | None = None
    watch: Callable[[int, float, Loop], bool] = lambda n, loss, loop: True
    max_versions: int | None = None

    def run(self) -> Trained:
        """Returns what the training gives; the model has its weights then."""
        model, names = self.passes.model.train(), self.passes.stages
        rows = zip(names, self.replicas or (1,) * len(names), strict=True)
        of_copies = self.optimizer, self.scheduler
        self._stages = [Stage(model, layers, self.reducer or Reducer(), count, *of_copies) for layers, count in rows]
        weights = {name for stage in self._stages for name in stage.copies[0].weights}
        lost = [name for name, weight in model.named_parameters() if weight.requires_grad and name not in weights]
        assert not lost, f"no stage has the weights {', '.join(lost)}: give their names with those of its layers"
        self._trained, self._clock, self._base, self._method = Trained(), 0, 0, self.rules[0]
        self.passes.repeats_forwards = any(each.reads.rule == "recompute" for each in self.rules.values())
        self._norms: list[float] = []
        self._norms_at_drain = 0
        with self.passes.hooks():
            for n, batch in enumerate(self.batches):
                if n in self.drains or n in self.rules:
                    self._drain(n)
                self._run_minibatch(n, batch)
                if not self.watch(n + 1, self._trained.losses[n], self):
                    break
        self._drain(n + 1)
        trained = self._trained
        trained.state, trained.skipped = trained.at[n + 1], tuple(stage.skipped for stage in self._stages)
        for stage in self._stages:
            trained.optimizer |= stage.copies[0].optimizer_state()
            trained.ema |= {} if self.ema is None else stage.averages()
        return trained

    def output(self, inputs: Any) -> Any:
        """Returns what the newest weights of all stages make of an input."""
        with torch.no_grad():
            return self.passes.run({name: w for stage in self._stages for name, w in stage.weights().items()}, inputs)

    # -- minibatches and drains -----------------------------------------------------------------------------------

    def _run_minibatch(self, n: int, batch: Any) -> None:
        method, loss, loss_weight = self._method, 0.0, 0.0
        for part, (piece, samples) in enumerate(split_batch(batch, method.microbatches)):
            number = n * method.microbatches + part
            k = number - self._base
            gradients, part_loss, part_weight = self._differentiate(piece, number, k) if samples else ({}, 0.0, 0.0)
            loss, loss_weight = loss + part_loss, loss_weight + part_weight
            for stage in self._stages:
                stage.add(k, gradients, 1.0 if method.rounds else part_weight)
            self._update([s for s in range(len(self._stages)) if (k + 1) % self._per_update(s) == 0])
        self._trained.losses[n], self._trained.weights[n] = loss / loss_weight, loss_weight
        self._trained.rates[n] = next((stage.rate for stage in self._stages if stage.rate is not None), 0.0)

    def _differentiate(self, batch: Any, number: int, k: int) -> tuple[Values, float, float]:
        """Returns the gradients of a microbatch, its loss and its weight."""
        reads, old, new, buffers = self._method.reads, Values(), Values(), Values()
        for s, stage in enumerate(self._stages):
            versions = stage.copy_of(k).versions
            read = versions[reads.forward(s, k)]
            stage.taken_at = read.weights
            old |= read.predict(reads.ahead(s))
            buffers |= stage.buffers_of(k)
            if reads.backward is not None and reads.rule != "stash":
                v = reads.backward(s, k)
                share = 0.0 if reads.share is None else reads.share ** (v - reads.forward(s, k))
                newer = versions[v].predict(reads.back(s))
                new |= {name: (1 - share) * w + share * read.weights[name] for name, w in newer.items()}
        slopes = self.passes.differentiate(batch, number, old, new, buffers, reads.rule, self._method.rounds)
        for stage in self._stages:
            replica = stage.buffers_of(k)
            replica |= {name: buffers[name].detach() for name in replica}
        return slopes

    def _drain(self, n: int) -> None:
        """Makes the updates that are still open; each stage has one version then, and replicas share statistics."""
        self._update([s for s, stage in enumerate(self._stages) if not stage.is_empty])
        for stage in self._stages:
            average_buffers(stage)
            for each in stage.copies:
                each.versions = each.versions[-1:]
        if n in self.rules:
            self._clock += self._stages[0].updates
            self._method = self.rules[n]
            for s, stage in enumerate(self._stages):
                stage.updates, reads = 0, self._method.reads
                for each in stage.copies:
                    by = reads.by if reads.ahead(s) or reads.back(s) else ""
                    each.predict_by(by, reads.gamma(s) if by == "average" else 0.0, self._rates(s, each))
        self._base, self._norms_at_drain = n * self._method.microbatches, len(self._norms)
        if n:
            self._trained.drains.append(n)
            self._trained.at[n] = self._state()

    def _state(self) -> Values:
        model = self.passes.model
        with torch.no_grad():
            for stage in self._stages:
                for name, tensor in (stage.weights() | stage.buffers[0]).items():
                    owner, _, leaf = name.rpartition(".")
                    getattr(model.get_submodule(owner), leaf).copy_(tensor)
        return copy_values(model.state_dict())

    # -- updates ----------------------------------------------------------------------------------------------------

    def _per_update(self, s: int) -> int:
        return self._method.per_update[s] if self._method.per_update else self._method.microbatches

    def _clock_of(self, s: int) -> int:
        """Returns the updates of the input stage that an update of stage s comes after: one clock for all stages."""
        return self._clock + self._stages[s].updates * self._per_update(s) // self._per_update(0)

    def _rates(self, s: int, each: Copy, present: float = 1.0) -> list[float]:
        """Returns the rates of the groups at the next update: each minibatch moves all stages equally."""
        clock = self._clock_of(s)
        factor = self._per_update(s) / self._per_update(0) * self._method.compensation.rate(s, clock) * present
        return [rate * factor for rate in each.rates.at(clock)]

    def _update(self, due: Sequence[int]) -> None:
        """Makes, or skips, an update of some stages."""
        finite = {s: self._stages[s].is_finite() for s in due}
        steps = [s for s in due if not self.skips or (all(finite.values()) if self.skips == "together" else finite[s])]
        means = {s: self._stages[s].mean_gradients(1.0 if self._method.rounds else None) for s in steps}
        bounds = self._find_bounds(means) if self.clip is not None else {}
        for s in steps:
            self._step(s, means[s], bounds.get(s, ()))
        for s in due:
            stage = self._stages[s]
            stage.rate = next(iter(stage.copies[0].rates.at(self._clock_of(s))), None)
            stage.updates += 1
            stage.skipped += s not in steps
            for each in stage.copies:
                if s in steps:
                    each.finish_update(self._rates(s, each))
                else:
                    each.versions.append(each.versions[-1])
                if self.max_versions:
                    each.versions[: -self.max_versions] = [None] * (len(each.versions) - self.max_versions)
            stage.clear()

    def _find_bounds(self, means: Mapping[int, Sequence[Values]]) -> dict[int, list[float]]:
        """Returns the norms that clip: of each copy itself, or of all stages, perhaps of an earlier update."""
        norms = {
            s: [float(sum((g.abs() ** 2).sum() for g in mean.values())) ** 0.5 for mean in means[s]] for s in means
        }
        delay = self._method.norm_delay
        if delay is None or not norms:
            return norms
        assert len(norms) == len(self._stages), "stages without a common update have no common norm"
        self._norms.append(sum(norm**2 for (norm,) in norms.values()) ** 0.5)
        if delay == 0:
            return {s: [self._norms[-1]] for s in norms}
        # Of update v - D since the last drain, or the last one before it.
        late = [0.0, *self._norms][max(self._norms_at_drain, len(self._norms) - delay)]
        return {s: [max(late, norm)] for s, (norm,) in norms.items()}

    def _step(self, s: int, means: Sequence[Values], bounds: Sequence[float]) -> None:
        stage, rule = self._stages[s], self._method.compensation
        present = stage.present if self._method.rounds and not stage.reducer.averages else 1.0
        share = len(self._stages) ** 0.5 if self._method.norm_delay is None else 1.0  # of squared norms, each alike
        for number, (each, mean) in enumerate(zip(stage.copies, means, strict=True)):
            if each.optimizer is None:
                continue
            y = each.versions[-1].weights
            for name, p in each.weights.items():
                p.grad = None
                if (g := mean.get(name)) is not None:
                    g = g if self.clip is None else g * min(1.0, self.clip / share / (bounds[number] + 1e-6))
                    p.grad = rule.gradient(s, name, g, y[name], stage.taken_at[name]).contiguous()
            for group, rate in zip(each.optimizer.param_groups, self._rates(s, each, present), strict=True):
                group["lr"] = rate
            rule.step(s, each.optimizer, each.weights, y)
            each.newest = rule.predict(s, each.optimizer, each.weights)
            if self.ema is not None:
                each.ema = {name: self.ema * a + (1 - self.ema) * each.newest[name] for name, a in each.ema.items()}
        if stage.reducer.average([each.newest for each in stage.copies]):
            for each in stage.copies:
                for name, p in each.weights.items():
                    p.data.copy_(each.newest[name])
