"""Breaks the library on purpose, one line at a time, and checks that the tests notice each break.

    .venv/bin/python scripts/deliberate_breaks.py                  all of them, 10 to 20 minutes on two cores
    .venv/bin/python scripts/deliberate_breaks.py stash norm       those whose names contain one of these words
    .venv/bin/python scripts/deliberate_breaks.py --list           their names and what they change

Each break replaces one piece of text in one file of a scratch copy; the checkout itself never changes. The test files
that are named with the break run first, then their marked tests, then all default tests, until one fails. Exits with 1
if a break is not noticed or if its text no longer occurs exactly once in its file.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).resolve().parents[1]
COPIED = (
    "src",
    "tests",
    "examples",
    "benchmarks",
    "docs",
    "scripts",
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "LICENSE",
    "pyproject.toml",
)
ABOUT_THE_SOURCE = ("tests/test_house.py", "tests/test_packaging.py")
"""They fail for any change, or for a copy."""
TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Break:
    """A change that the tests of continuous integration must notice.

    Attributes:
        name: short, with the area in front.
        file: from src/pipedream.
        old: text that occurs exactly once in the file.
        new: what replaces it.
        tests: files below tests/, or tests of them, that are expected to notice.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


BREAKS = (
    # Schedules
    Break(
        "schedule: GPipe runs its backwards in reverse",
        "schedules/synchronous/gpipe.py",
        "backward(stage_replica, k) for k in mine)",
        "backward(stage_replica, k) for k in reversed(mine))",
        ("schedules/test_pictures.py",),
    ),
    Break(
        "schedule: 1F1B warms up with one forward too many",
        "schedules/synchronous/one_f_one_b.py",
        "plan.in_flight[stage_replica.stage] - 1, max(len(mine) - 1, 0)",
        "plan.in_flight[stage_replica.stage], max(len(mine) - 1, 0)",
        ("schedules/test_pictures.py",),
    ),
    Break(
        "schedule: interleaved 1F1B warms up too long",
        "schedules/synchronous/interleaved.py",
        "min(2 * (p - 1 - rank) + (chunks - 1) * p, total)",
        "min(2 * (p - rank) + (chunks - 1) * p, total)",
        ("schedules/test_claims.py",),
    ),
    Break(
        "schedule: ZB-H1 claims the bubble of an unsplit backward",
        "schedules/synchronous/zb_h1.py",
        "(p - 1) / (3 * m + p - 1)",
        "(p - 1) / (m + p - 1)",
        ("schedules/test_claims.py",),
    ),
    # Weight rules
    Break(
        "weights: stashing reads one version too new",
        "core/schedule/weights.py",
        "return max(0, microbatch // self.replicas[stage] - self.staleness(stage))",
        "return max(0, microbatch // self.replicas[stage] - self.staleness(stage) + 1)",
        ("core/test_core_rules.py",),
    ),
    Break(
        "weights: 2BW has staleness 2",
        "core/schedule/weights.py",
        "return max(microbatch // self.per_update - 1, 0)",
        "return max(microbatch // self.per_update - 2, 0)",
        ("core/test_core_rules.py",),
    ),
    Break(
        "weights: vertical sync forgets the common multiple of the replicas",
        "core/schedule/weights.py",
        "return cycle * (first * newest // cycle) // self.replicas[stage]",
        "return first * newest // self.replicas[stage]",
        ("core/test_core_rules.py",),
    ),
    Break(
        "weights: the newest version is one too old for a backward",
        "core/schedule/weights.py",
        "return microbatch // self.per_update[stage]",
        "return max(0, microbatch // self.per_update[stage] - 1)",
        ("verifier/test_verifier.py",),
    ),
    Break(
        "weights: the last update of a run is left out",
        "core/schedule/rules.py",
        "return -(-total // self.per_update[stage])",
        "return total // self.per_update[stage]",
        ("core/test_core_rules.py",),
    ),
    Break(
        "weights: a stage's rate ignores its replicas",
        "core/schedule/rules.py",
        "self.per_update[stage] / self.per_update[0] * rate_factor(",
        "rate_factor(",
        ("end_to_end/test_replicas.py",),
    ),
    # Lowering and verifier
    Break(
        "lowering: the last stage but one waits for no gradient",
        "core/schedule/lowering.py",
        "        if stage < last:\n            yield Carries.GRADIENT",
        "        if stage < last - 1:\n            yield Carries.GRADIENT",
        ("core/test_lowering.py",),
    ),
    Break(
        "host store: another rank reads the version that is there",
        "runtime/stage/host_store.py",
        "lambda: int(newest) >= version and int(turn) >= gradients_of,",
        "lambda: int(turn) >= gradients_of,",
        ("runtime/stage/test_host_store.py",),
    ),
    Break(
        "host store: buffers of a copy are lost",
        "runtime/stage/host_store.py",
        "slots[number].copy_(buffer)",
        "slots[number].clone()",
        ("runtime/stage/test_host_store.py",),
    ),
    Break(
        "host store: an evaluation reads weights that are not on the device",
        "runtime/stage/host_store.py",
        "leaves, _ = self._shared_weights.copy(self.newest)",
        "leaves = self.peek().leaves",
        ("runtime/stage/test_host_store.py",),
    ),
    Break(
        "host store: the host runs ahead without a bound",
        "runtime/stage/host_store.py",
        "while len(self._dropped) > self._most_dropped:",
        "while False:",
        ("runtime/stage/test_host_store.py",),
    ),
    Break(
        "host store: gradients stay on the device",
        "runtime/stage_state.py",
        "self.gradients.replace(*self.versions.copy_gradients_to_handles(self.gradients.accumulators))",
        "pass",
        ("runtime/stage/test_host_store.py",),
    ),
    Break(
        "worker: updates are made in the loop",
        "runtime/worker.py",
        "overlaps = self.program.overlaps_updates and",
        "overlaps = False and",
        ("runtime/stage/test_host_store.py",),
    ),
    Break(
        "waits: an op does not wait for what another rank leaves in shared memory",
        "verifier/waits.py",
        "if missing is not None:\n            self.readers",
        "if False:\n            self.readers",
        ("schedules/test_roundpipe.py",),
    ),
    Break(
        "clock: a forward does not wait for an update on another rank",
        "simulator/clock.py",
        "return left_s if is_local else left_s + self.costs",
        "return left_s if is_local else 0.0 * self.costs",
        ("schedules/test_roundpipe.py",),
    ),
    Break(
        "stateless stage: the next rank does not take over changed buffers",
        "runtime/stateless_stage.py",
        "if self._update > 1:",
        "if False:",
        ("runtime/stage/test_host_store.py",),
    ),
    Break(
        "host store: a turn leaves its gradients in the place of the turn before",
        "runtime/stage/host_store.py",
        "slots = self.store_format.view_rotation(self._rotations[update % len(self._rotations)])",
        "slots = self.store_format.view_rotation(self._rotations[0])",
        ("runtime/stage/test_host_store.py",),
    ),
    Break(
        "host store: home does not wait for the turn of another rank",
        "runtime/stage/host_store.py",
        "yield from wait_for(self._shared_weights.wait(gradients_of=update))",
        "yield from ()",
        ("runtime/stage/test_host_store.py",),
    ),
    Break(
        "roundpipe: slots of forwards are chosen by their bound alone",
        "experimental/roundpipe.py",
        "min(counts, key=dispatch_s)",
        "counts[0]",
        ("schedules/test_roundpipe.py",),
    ),
    Break(
        "worker: a joint update takes the turn of its own stage alone",
        "runtime/worker.py",
        "if self.update_barrier.couples_stages else {stage: stage_state}",
        "if False else {stage: stage_state}",
        ("runtime/stage/test_host_store.py",),
    ),
    Break(
        "roundpipe: a minibatch begins with the same worker as the one before",
        "experimental/roundpipe.py",
        "turns = p // gcd(count, p) if delay else 1",
        "turns = 1",
        ("schedules/test_roundpipe.py",),
    ),
    Break(
        "lowering: targets have one receive posted ahead",
        "core/schedule/lowering.py",
        "Route(Carries.INPUT, 0, last, max(2, in_flight[0]))",
        "Route(Carries.INPUT, 0, last, 1)",
        ("core/test_lowering.py", "verifier/test_verifier.py"),
    ),
    Break(
        "lowering: phases share the shallower channels",
        "core/schedule/lowering.py",
        "depths = [max(c.depth for c in ends)",
        "depths = [min(c.depth for c in ends)",
        ("training/test_phases.py::test_common_channels_are_the_deepest_and_of_one_placement",),
    ),
    Break(
        "verifier: one version too many is allowed",
        "verifier/proof.py",
        "if versions > allowed:",
        "if versions > allowed + 1:",
        ("verifier/test_verifier.py", "verifier/test_mutants.py"),
    ),
    Break(
        "verifier: an op may come before what it needs",
        "verifier/unrolled.py",
        "if place[1] > last_allowed:",
        "if place[1] < 0:",
        ("verifier/test_verifier.py", "verifier/test_mutants.py"),
    ),
    Break(
        "verifier: messages may overtake each other",
        "verifier/unrolled.py",
        "if sent_k != received_k:",
        "if sent_k < 0:",
        ("verifier/test_verifier.py", "verifier/test_mutants.py"),
    ),
    Break(
        "verifier: nobody ever waits for a message",
        "verifier/waits.py",
        "return message in self.delivered",
        "return True",
        ("verifier/test_verifier.py",),
    ),
    Break(
        "verifier: holders of tied weights do not wait for each other",
        "verifier/waits.py",
        'return all(self._arrive(rank, ("tied", number, update)) for number in numbers)',
        "return numbers == numbers",
        ("simulator/test_clock.py",),
    ),
    # Simulator
    Break(
        "simulator: the sum over holders of tied weights takes no time",
        "simulator/costs.py",
        "return [(max(at_s for at_s, _ in arrivals), size, seconds)]",
        "return [(max(at_s for at_s, _ in arrivals), 0.0, 0.0)]",
        ("simulator/test_clock.py",),
    ),
    Break(
        "simulator: what is recomputed waits for the gradient",
        "simulator/clock.py",
        "return rank.arrival_s - wire.early_s",
        "return rank.arrival_s",
        ("simulator/test_periods.py",),
    ),
    Break(
        "simulator: an op with jitter may end before its message arrives",
        "simulator/clock.py",
        "max(now + seconds * draw(letter), rank.arrival_s)",
        "now + seconds * draw(letter)",
        ("simulator/test_costs.py",),
    ),
    Break(
        "runtime: a stage recomputes when it has the gradient",
        "runtime/worker.py",
        "program.recomputes(channel.target):",
        "False:",
        ("end_to_end/test_recompute.py",),
    ),
    Break(
        "simulator: stragglers are not slow",
        "simulator/clock.py",
        "now + seconds if draw is None else max(now + seconds * draw(letter), rank.arrival_s)",
        "now + seconds",
        ("simulator/test_costs.py",),
    ),
    Break(
        "simulator: a sum is over when the last message is, even if somebody comes later",
        "simulator/clock.py",
        "barrier.over_s = max(now, *(arrival_s + busy_s for arrival_s, _ in barrier.arrivals))",
        "barrier.over_s = now",
        ("simulator/test_clock.py", "simulator/test_clock_oracle.py"),
    ),
    Break(
        "simulator: flows do not share a port",
        "simulator/messages.py",
        "narrowest, rate = port, port.spare_bytes_per_s / port.waiting",
        "narrowest, rate = port, port.spare_bytes_per_s",
        ("simulator/test_clock_oracle.py", "simulator/test_clock.py"),
    ),
    Break(
        "costs: a ring sends each byte once",
        "core/plan/cost.py",
        "return 2 * (workers - 1) * (latency_s + size_bytes / (workers * self.bytes_per_s))",
        "return (workers - 1) * (latency_s + size_bytes / (workers * self.bytes_per_s))",
        ("core/test_core_rules.py", "core/test_ports.py"),
    ),
    # Planner
    Break(
        "planner: messages are added to the computing that hides them",
        "planner/dynamic_program/recurrence.py",
        "spread(np.maximum(compute_s, port_s)",
        "spread(compute_s + port_s",
        ("planner/test_recurrence.py",),
    ),
    Break(
        "planner: a stage that just fits is refused",
        "planner/dynamic_program/recurrence.py",
        "fits = need(first) <= memory_bytes",
        "fits = need(first) < memory_bytes",
        ("planner/test_search.py", "planner/test_depth.py"),
    ),
    Break(
        "memory: a method with one version of the weights counts as flushing",
        "core/schedule/occupancy.py",
        "flushes=rules.flushes,",
        "flushes=rules.weights.versions(stage) == 1,",
        ("core/test_occupancy.py",),
    ),
    Break(
        "memory: gradients of a rank's other stages are not counted",
        "simulator/memory.py",
        "return self._kept_bytes + self.has_sums * self.sums_bytes",
        "return self._kept_bytes",
        ("cli/test_simulate_command.py",),
    ),
    Break(
        "planner: passes hide all copies",
        "planner/tables/search_space.py",
        "if not may_at_all or cluster.host_bytes_per_s is None:",
        "if True:",
        ("planner/test_offload.py",),
    ),
    Break(
        "planner: costs are kept for slower links, too",
        "planner/tables/search_space.py",
        "cluster=space.cluster.with_slower_links(factor), shared_tables={})",
        "cluster=space.cluster.with_slower_links(factor))",
        ("planner/test_mesh_search.py",),
    ),
    Break(
        "planner: joined layers are not cut anew",
        "planner/pipeline_search.py",
        "plan = min((plan, fine or plan), key=tie_break_key)",
        "plan = min((plan, plan), key=tie_break_key)",
        ("planner/test_large_models.py",),
    ),
    Break(
        "planner: counts that do not divide a cycle are planned",
        "planner/pipeline_search.py",
        "for count in _list_counts(self.workers) if not cycle % count]",
        "for count in _list_counts(self.workers)]",
        ("planner/test_cycles.py",),
    ),
    Break(
        "planner: the full depth forgets what replicas have in common",
        "core/plan/depth.py",
        "r_s + 2 * r_u - 2 * gcd(r_s, r_u) + ceil(",
        "r_s + 2 * r_u + ceil(",
        ("simulator/test_periods.py::test_rings_are_as_deep_as_what_lies_between_replicas",),
    ),
    Break(
        "planner: the 2BW model pays for the sum in each microbatch",
        "planner/two_bw.py",
        "slots_s.append(max(compute_s + before_s + after_s, sum_s / per_replica))",
        "slots_s.append(max(compute_s + before_s + after_s, sum_s))",
        ("planner/test_two_bw.py",),
    ),
    Break(
        "classic planner: activations are sent, gradients are not",
        "../../benchmarks/paper_tables/classic.py",
        "2.0 * states.output_bytes[before] / (rate * q)",
        "states.output_bytes[before] / (rate * q)",
        ("benchmarks/test_classic.py",),
    ),
    Break(
        "classic planner: outputs that skip a stage cross no cut",
        "../../benchmarks/paper_tables/classic_states.py",
        "nodes |= self._needed[node] | 1 << node",
        "nodes |= 1 << node",
        ("benchmarks/test_classic.py",),
    ),
    # Updates
    Break(
        "trial: estimates that begin after a step are not seen",
        "runtime/update/trial.py",
        "_STEPS = 12",
        "_STEPS = 1",
        ("runtime/update/test_trial.py",),
    ),
    Break(
        "trial: some pairs of stages are not told apart",
        "runtime/update/trial.py",
        "for bit in range((len(trained) - 1).bit_length())",
        "for bit in range(1)",
        ("runtime/update/test_trial.py",),
    ),
    Break(
        "trial: a hook on the step is not tried",
        "sharding/whole_weights.py",
        "not in _ELEMENTWISE or optimizer._optimizer_step_pre_hooks",
        "not in _ELEMENTWISE",
        ("runtime/update/test_trial.py",),
    ),
    Break(
        "trial: counters of a user's optimizer go on",
        "capture/preserve_state.py",
        "self._restore += [partial(_reset, value, name, item) for name, item in counts.items()]",
        "pass",
        ("runtime/update/test_trial.py",),
    ),
    Break(
        "update: gradients keep the loss scale",
        "runtime/update/optimizer.py",
        "divisor = gathered.divisor(self._mean_of_rounds) * self.scale",
        "divisor = gathered.divisor(self._mean_of_rounds)",
        ("end_to_end/test_couplings.py::test_the_loss_is_scaled_as_a_mean",),
    ),
    Break(
        "gradient: auxiliary losses count alike in all microbatches",
        "runtime/stage/stage_module.py",
        "self.auxiliary_scale = self.loss_weight * loss_scale",
        "self.auxiliary_scale = loss_scale",
        ("runtime/stage/test_auxiliary.py",),
    ),
    Break(
        "gradient: auxiliary losses are not scaled",
        "runtime/stage/stage_module.py",
        "self.auxiliary_scale = self.loss_weight * loss_scale",
        "self.auxiliary_scale = self.loss_weight",
        ("runtime/stage/test_auxiliary.py",),
    ),
    Break(
        "experts: second choices take the places of first ones",
        "experts.py",
        "occupied = chosen.sum(1, keepdim=True)",
        "occupied = 0 * chosen.sum(1, keepdim=True)",
        ("test_experts.py",),
    ),
    Break(
        "update: an incomplete round steps at the full rate",
        "runtime/update/optimizer.py",
        "return (count / self.replicas if self._mean_of_rounds else 1.0), gathered.stop_request > 0",
        "return 1.0, gathered.stop_request > 0",
        ("end_to_end/test_replicas.py",),
    ),
    Break(
        "choices: a recipe comes before the plan",
        "core/plan/choices.py",
        "in (recipe, plan, checkpoint, command):",
        "in (plan, recipe, checkpoint, command):",
        ("core/test_choices.py",),
    ),
    Break(
        "messages: the comparison has another unit than the run",
        "runtime/session/model_runner.py",
        "(choose_unit(loss, message, output, targets) if has_unit else 1.0)",
        "1.0",
        ("runtime/test_encoded_messages.py",),
    ),
    Break(
        "messages: masks are encoded, too",
        "runtime/comm/encoding.py",
        "(not only_wanted or message.wants[i])",
        "True",
        ("runtime/comm/test_encoding.py",),
    ),
    Break(
        "messages: gradients have the encoding of activations",
        "core/plan/messages.py",
        "Carries.GRADIENT: self.gradients}",
        "Carries.GRADIENT: self.activations}",
        ("runtime/comm/test_encoding.py",),
    ),
    Break(
        "first minibatch: parameters that a loss reads are overlooked",
        "runtime/session/model_runner.py",
        "for node in nodes for earlier, _ in node.next_functions}",
        "for node in () for earlier, _ in node.next_functions}",
        ("runtime/test_as_plain_pytorch.py",),
    ),
    Break(
        "first minibatch: gradients of a loss and its parts are not compared",
        "runtime/session/reference_run.py",
        "if has_loss_of_parts and self._has_gradient_of_parts(first, training):",
        "if has_loss_of_parts:",
        ("runtime/test_as_plain_pytorch.py",),
    ),
    Break(
        "first minibatch: a model's own loss may scale its gradient by the batch",
        "runtime/session/reference_run.py",
        "for parts in (first.parts[:2], first.pair)",
        "for parts in (first.parts[:2], first.parts[:2])",
        ("runtime/test_first_minibatch.py",),
    ),
    Break(
        "first minibatch: auxiliary losses count as parts of the loss",
        "runtime/session/model_runner.py",
        "weight * unit if auxiliary else 0.0",
        "weight * unit",
        ("runtime/test_first_minibatch.py",),
    ),
    Break(
        "first minibatch: what a forward writes into copies is lost",
        "runtime/session/reference_run.py",
        'if (written := run.changed["weights"]) and self.runner.shares_weights:',
        "if written := []:",
        ("capture/test_hidden_effects.py",),
    ),
    Break(
        "first minibatch: each microbatch may write weights anew",
        "runtime/session/reference_run.py",
        "if difference := find_difference(expected, actual, whole.numbers.tolerance):",
        "if difference := None:",
        ("capture/test_hidden_effects.py",),
    ),
    Break(
        "capture: weights stay as a measurement leaves them",
        "capture/preserve_state.py",
        "storage.copy_(self._value)",
        "pass",
        ("capture/test_preserve_state.py",),
    ),
    Break(
        "first minibatch: metrics need not be means",
        "runtime/session/reference_run.py",
        "difference = explain_mean(",
        "difference = not name and explain_mean(",
        ("runtime/results/test_metric_means.py",),
    ),
    Break(
        "first minibatch: metrics are tried on the model's outputs alone",
        "runtime/results/metric_means.py",
        "for seed in range(6))",
        "for seed in ())",
        ("runtime/results/test_metric_means.py",),
    ),
    Break(
        "data: an epoch that is set too late is ignored",
        "runtime/data/epochs.py",
        "if batches or self._begun() >= following:",
        "if False:",
        ("training/test_habits.py",),
    ),
    Break(
        "data: the epochs of a train count on, whatever the loop sets",
        "runtime/data/epochs.py",
        "_NUMBERS[self._loader] = epoch, epoch - following",
        "pass",
        ("training/test_habits.py",),
    ),
    Break(
        "runtime: a second forward writes its weights again",
        "runtime/stage/recompute.py",
        "if not torch.equal(weight, old):",
        "if old is None:",
        ("capture/test_hidden_effects.py",),
    ),
    Break(
        "runtime: a conjugate gradient stays one",
        "runtime/update/optimizer.py",
        "else gradient.resolve_conj()",
        "else gradient",
        ("end_to_end/test_bugs.py",),
    ),
    Break(
        "messages: the greatest value of a block does not fit",
        "runtime/comm/encoding.py",
        '{"int8": 127, "int4": 7}',
        '{"int8": 126, "int4": 7}',
        ("runtime/comm/test_encoding.py",),
    ),
    Break(
        "messages: the model is not encoded for the comparison",
        "runtime/session/reference_run.py",
        "backward=True, encodes=True)",
        "backward=True, encodes=False)",
        ("runtime/test_encoded_messages.py",),
    ),
    Break(
        "messages: the simulation sends whole ones",
        "simulator/costs.py",
        "* shares.get(channel.carries, 1.0)",
        "* 1.0",
        ("workflows/test_less_communication.py",),
    ),
    Break(
        "messages: the planner forgets what encoding takes",
        "core/plan/messages.py",
        "runtime.encodings_s_per_byte.get(encoding, 0.0) - ",
        "0.0 - ",
        ("workflows/test_less_communication.py",),
    ),
    Break(
        "sums: a skipped update leaves its error behind",
        "runtime/update/low_rank.py",
        "self._rounds.items() if is_made else ()",
        "self._rounds.items()",
        ("runtime/update/test_low_rank.py",),
    ),
    Break(
        "sums: an error has the unit of the sum",
        "runtime/update/low_rank.py",
        "error, alpha=self._divisor)",
        "error)",
        ("runtime/update/test_low_rank.py",),
    ),
    Break(
        "sums: outer steps without Nesterov's look ahead",
        "runtime/update/average.py",
        "change.add_(velocity, alpha=self.method.momentum)",
        "velocity",
        ("runtime/update/test_sums.py",),
    ),
    Break(
        "update: the schedule of a replicated stage runs on its own clock",
        "runtime/update/optimizer.py",
        "return self._finished_rounds - self.scheduled",
        "return self.updates - self.scheduled",
        ("end_to_end/test_replicas.py",),
    ),
    Break(
        "update: the average takes the wrong share of the new weights",
        "runtime/update/optimizer.py",
        "for handle in self._handles], 1.0 - self._decay)",
        "for handle in self._handles], self._decay)",
        ("end_to_end/test_transparency.py",),
    ),
    Break(
        "update: clipping also scales small gradients up",
        "runtime/update/optimizer.py",
        "if scale < 1.0 and gradients:",
        "if gradients:",
        ("end_to_end/test_transparency.py",),
    ),
    Break(
        "update: holders of a tied weight keep their own gradients",
        "runtime/update/tied_weights.py",
        "gradients[stage][index] = total.clone() if count else None",
        "gradients[stage][index] = local_sums[0].clone() if count else None",
        ("end_to_end/test_couplings.py",),
    ),
    Break(
        "update: the loss scale grows after a skipped update",
        "runtime/update/loss_scale.py",
        "self.value *= self._scaling.backoff",
        "self.value *= self._scaling.growth",
        ("end_to_end/test_couplings.py",),
    ),
    Break(
        "update: error feedback forgets the last update",
        "runtime/update/compensation.py",
        "torch._foreach_add_(weights, last_updates, alpha=self._strength)",
        "torch._foreach_add_(weights, last_updates, alpha=0.0)",
        ("runtime/update/test_compensation.py",),
    ),
    Break(
        "update: second moments lose their columns at a new basis",
        "runtime/update/rotation.py",
        'index_select(0 if side == "left" else 1, order)',
        'index_select(0 if side == "left" else 1, order.flip(0))',
        ("end_to_end/test_compensation.py",),
    ),
    Break(
        "all-reduce: a gradient that nobody has becomes zeros",
        "runtime/update/all_reduce.py",
        "piece.view_as(self._handles[i]) if present[i] else None",
        "piece.view_as(self._handles[i])",
        ("runtime/update/test_all_reduce.py",),
    ),
    Break(
        "all-reduce: buckets start in the order of the forward",
        "runtime/update/all_reduce.py",
        "for index in reversed(range(len(handles))):",
        "for index in range(len(handles)):",
        ("runtime/update/test_all_reduce.py",),
    ),
    # Versions of weights
    Break(
        "versions: an update writes into weights that a forward will read",
        "runtime/stage/versions.py",
        "if newest.readers or self.newest in upcoming:",
        "if newest.readers:",
        ("runtime/stage/test_versions.py",),
    ),
    Break(
        "versions: a set is freed while a backward still needs it",
        "runtime/stage/versions.py",
        "if v not in upcoming and not s.readers and v != self.newest",
        "if v not in upcoming and v != self.newest",
        ("runtime/stage/test_versions.py",),
    ),
    Break(
        "versions: an average of updates decays the wrong way",
        "runtime/stage/predictions.py",
        "step, 1.0 - self._gamma)",
        "step, self._gamma)",
        ("end_to_end/test_delayed.py",),
    ),
    Break(
        "stage: a split backward loses what leaves the path",
        "runtime/stage/split_backward.py",
        "branch.run(self.incoming.pop(number))",
        "self.incoming.pop(number)",
        ("runtime/stage/test_split_backward.py",),
    ),
    # Checkpoints
    Break(
        "checkpoint: one more than asked for is kept",
        "runtime/checkpoint/folders.py",
        "[: -keep if keep else 0]",
        "[: -keep - 1 if keep else 0]",
        ("runtime/checkpoint/test_checkpoints.py",),
    ),
    Break(
        "checkpoint: a file that was cut short is not noticed",
        "runtime/checkpoint/folders.py",
        "if size_here != size:",
        "if size_here > size:",
        ("runtime/checkpoint/test_checkpoints.py",),
    ),
    Break(
        "checkpoint: tensors are not compared with their checksums",
        "runtime/checkpoint/pieces.py",
        "compute_crc32(tensor) != piece.crc32",
        "False",
        ("runtime/checkpoint/test_checkpoints.py",),
    ),
    Break(
        "checkpoint: the manifest is not compared with its checksum",
        "core/checkpoint.py",
        "if saved_crc32 != crc32:",
        "if False:",
        ("runtime/checkpoint/test_checkpoints.py",),
    ),
    Break(
        "checkpoint: the oldest is taken for the newest",
        "runtime/checkpoint/folders.py",
        "return next(reversed(list_checkpoints(path)), None)",
        "return next(iter(list_checkpoints(path)), None)",
        ("runtime/checkpoint/test_checkpoints.py",),
    ),
    Break(
        "checkpoint: each rank goes by its own measurements",
        "training/checkpoint_cost.py",
        "spent_s, cost_s, written, _ = map(max, zip(*rows, strict=True))",
        "spent_s, written = self.spent_s, max(self._written)",
        ("training/test_checkpoint_cost.py",),
    ),
    Break(
        "checkpoint: numbers that are not finite may be read",
        "core/artifact.py",
        "math.isfinite(value) and abs(value) <= 1e60",
        "True",
        ("core/test_core_artifact.py", "end_to_end/test_fuzz.py"),
    ),
    # Wire
    Break(
        "wire: the header forgets which gradients come back",
        "runtime/comm/message.py",
        "return cls(specs, end, message.structure, message.wants)",
        "return cls(specs, end, message.structure)",
        ("runtime/comm/test_message.py",),
    ),
    Break(
        "wire: a transposed tensor arrives in the wrong order of memory",
        "core/plan/mesh.py",
        "for dim in reversed(order):",
        "for dim in reversed(range(len(order))):",
        ("runtime/comm/test_message.py",),
    ),
    Break(
        "wire: receives stay posted between two streams",
        "runtime/comm/gloo.py",
        "works = [end.send(filler.all_bytes, end.head_tag) for _ in range(end.depth)]",
        "works = [end.send(filler.all_bytes, end.head_tag) for _ in range(end.depth - 1)]",
        ("runtime/comm/test_gloo.py",),
    ),
    Break(
        "wire: a link receives what no header has announced",
        "runtime/comm/nccl_link.py",
        "receives.append((work, tensor))",
        "receives += [(work, tensor), (self._communicator.recv([tensor], self._sender, 0), tensor)]",
        ("runtime/comm/test_nccl_link.py",),
    ),
    Break(
        "wire: tensors of a link are read before they have arrived",
        "runtime/comm/nccl_link.py",
        "work.wait()  # on a GPU",
        "pass  # on a GPU",
        ("runtime/comm/test_nccl_link.py",),
    ),
    Break(
        "wire: a host runs ahead of its GPU without a bound",
        "runtime/results/recorder.py",
        "event.synchronize()\n\n    def oldest",
        "pass\n\n    def oldest",
        ("runtime/results/test_recorder.py",),
    ),
    # Data and losses
    Break(
        "data: a replica reads its neighbour's minibatches",
        "runtime/data/sharded_reader.py",
        "if number % self._loader.replicas == self._loader.replica:",
        "if (number + 1) % self._loader.replicas == self._loader.replica:",
        ("runtime/data/test_sharded_reader.py",),
    ),
    Break(
        "data: readers on several machines draw other numbers for the same sample",
        "runtime/data/sharded_reader.py",
        "(self.replicas > 1 or self.alike)",
        "(self.replicas > 1)",
        ("runtime/data/test_sharded_reader.py",),
    ),
    Break(
        "data: a reader drops what it has read ahead of a drain",
        "runtime/data/reader.py",
        "minibatch = minibatch or next(self._minibatches)",
        "minibatch = next(self._minibatches)",
        ("runtime/data/test_source.py",),
    ),
    Break(
        "data: a resumed epoch starts one minibatch late",
        "runtime/data/reader.py",
        "return mark.samples < self._resumed_at.samples",
        "return mark.samples <= self._resumed_at.samples",
        ("runtime/data/test_sharded_reader.py",),
    ),
    Break(
        "data: a batch stays in memory that its loader uses again",
        "runtime/data/reader.py",
        "for tensor in tensors_in(batch)} if self._is_fixed else {}",
        "for tensor in tensors_in(batch)}",
        ("runtime/data/test_reused_memory.py",),
    ),
    Break(
        "checkpoint: the loop's lists grow while it is written",
        "pipeline.py",
        '"extra": saved_extra}',
        '"extra": self.extra}',
        ("runtime/checkpoint/test_what_is_kept.py",),
    ),
    Break(
        "data: a resumed epoch skips batches, however large they are",
        "runtime/data/reader.py",
        "if epoch != self._epochs.first or self._resumed_at is None:",
        "if mark.batches >= 0:",
        ("runtime/data/test_resumed_data.py",),
    ),
    Break(
        "data: a resumed epoch passes over other samples without a word",
        "runtime/data/reader.py",
        "if mark.indices_crc32 != resumed_at.indices_crc32 and",
        "if mark.indices_crc32 < 0 and",
        ("runtime/data/test_resumed_data.py",),
    ),
    Break(
        "data: rank 0 saves the state of the data, also where another rank reads",
        "runtime/session/checkpointer.py",
        "placement.readers[0] if self._workers_here.distributed else 0",
        "placement.readers[0] * 0",
        ("runtime/data/test_resumed_data.py",),
    ),
    Break(
        "run folder: a restart begins at the run that was resumed",
        "training/run_folder.py",
        "if _continues(continued, path, group):",
        "if path is None:",
        ("training/test_resume.py",),
    ),
    Break(
        "run folder: results of an earlier run are overwritten",
        "training/run_folder.py",
        'for name in ("weights.pt", "summary.json"):',
        'for name in ("weights.pth",):',
        ("training/test_resume.py",),
    ),
    Break(
        "run folder: losses of drained minibatches are left out",
        "training/train.py",
        "losses=loop.list_losses(),",
        "losses=loop.losses,",
        ("training/test_resume.py",),
    ),
    Break(
        "run folder: missing losses are not noticed",
        "training/run_folder.py",
        "list(range(rows[0][0] if rows else 0, first))",
        "list(range(rows[0][0] if rows else first, first))",
        ("training/test_resume.py",),
    ),
    Break(
        "data: a list of texts goes whole to each microbatch",
        "runtime/data/splitter.py",
        "return _holds_dicts(items) or not any(of_all) or",
        "return _holds_dicts(items) or",
        ("runtime/data/test_splitter.py",),
    ),
    Break(
        "data: a shared list is split where it has as many items as samples",
        "runtime/data/splitter.py",
        "return first is None  # else a shared list",
        "return len(items) == count  # else a shared list",
        ("runtime/data/test_splitter.py",),
    ),
    Break(
        "data: a last microbatch of one sample is not foreseen",
        "runtime/data/source.py",
        "return float(samples % size / size)",
        "return 0.0",
        ("runtime/data/test_last_batch.py",),
    ),
    Break(
        "data: a sparse tensor is split like others",
        "runtime/data/splitter.py",
        "and is_sparse(leaf):",
        "and False:",
        ("runtime/data/test_splitter.py",),
    ),
    Break(
        "data: a tensor without samples is split too",
        "runtime/data/splitter.py",
        "return dim if size == count else None",
        "return dim if size is not None and size >= count else None",
        ("runtime/data/test_splitter.py",),
    ),
    Break(
        "values: a message makes an object of any class",
        "runtime/comm/values.py",
        "_find_class(name, lambda kind: _list_fields(kind) is not None)",
        "_find_class(name, lambda kind: True)",
        ("runtime/test_values.py",),
    ),
    Break(
        "values: a tensor on meta is sent without its strides",
        "runtime/comm/values.py",
        "if not tensor.is_contiguous():",
        "if False:",
        ("runtime/test_values.py",),
    ),
    Break(
        "data: inputs that hold the samples along another dimension are cut along the first",
        "runtime/data/splitter.py",
        "{name: batch_dim if isinstance(batch_dim, int) else batch_dim.get(name, 0) for name in inputs}",
        "{name: 0 if isinstance(batch_dim, int) else batch_dim.get(name, 0) for name in inputs}",
        ("runtime/data/test_splitter.py", "test_pipeline.py"),
    ),
    Break(
        "random: dropout is the same for all microbatches",
        "core/seeds.py",
        "_hash_name(seed, layer) + microbatch * 0x9E3779B97F4A7C15",
        "_hash_name(seed, layer) + 0x9E3779B97F4A7C15",
        ("core/test_core_nouns.py",),
    ),
    Break(
        "losses: padding counts in the mean",
        "runtime/results/loss_calls.py",
        "counts = targets != ignore_index",
        "counts = targets == targets",
        ("runtime/results/test_losses.py", "runtime/results/test_loss_calls.py"),
    ),
    Break(
        "losses: a model's own loss counts by its samples",
        "runtime/results/losses.py",
        "return max(amounts.values), False",
        "return float(samples), False",
        ("runtime/results/test_loss_calls.py",),
    ),
    Break(
        "losses: a mean over microbatches forgets their weights",
        "runtime/results/scoring.py",
        "(loss.detach(), 1.0 if is_sum else weight)",
        "(loss.detach(), 1.0)",
        ("end_to_end/test_transparency.py",),
    ),
    Break(
        "results: a rank keeps results that it also gets in a message of their own",
        "runtime/results/results.py",
        "if self._rank not in self._find_reached(index):",
        "if False:",
        ("runtime/results/test_results.py",),
    ),
    Break(
        "seeds: every layer is taken for one that never draws",
        "runtime/stage/generators.py",
        "type(layer) in _NEVER_DRAW",
        "True",
        ("end_to_end/test_transparency.py",),
    ),
    Break(
        "loop: the op that found the end of the data counts as done",
        "core/schedule/program.py",
        "count -= isinstance(last, Op) and not exists(last)",
        "count -= False",
        ("core/test_lowering.py",),
    ),
    # Failures
    Break(
        "failures: a rank that has ended is taken for a silent one",
        "runtime/failure/verdict.py",
        "if silent_s > SILENT_S and not status.ended:",
        "if silent_s > SILENT_S:",
        ("runtime/failure/test_verdict.py",),
    ),
    Break(
        "failures: a stuck rank is never found",
        "runtime/failure/verdict.py",
        "if self._task_s <= limit_s:",
        "if self._task_s >= 0:",
        ("runtime/failure/test_verdict.py",),
    ),
    # Capture, profiler, metrics, phases, command line
    Break(
        "capture: autocast does not reach placeholders",
        "capture/placeholder.py",
        "casts or (torch.is_autocast_enabled(like.real_device.type) and not writes)",
        "casts",
        ("capture/test_placeholder.py",),
    ),
    Break(
        "capture: an input is sent as the forward has written it",
        "capture/slice_forward.py",
        "return leaf.clone() if is_sent else leaf",
        "return leaf",
        ("capture/test_hidden_effects.py",),
    ),
    Break(
        "capture: an input that a weight has written is no input",
        "capture/record.py",
        "if record.born < 0 and not record.state:  # an input",
        "if False:  # an input",
        ("capture/test_hidden_effects.py",),
    ),
    Break(
        "capture: a write through a view marks the view alone",
        "capture/record.py",
        "(record is target or _find_storage(record.tensor) == storage)",
        "record is target",
        ("capture/test_hidden_effects.py",),
    ),
    Break(
        "capture: a stage may end between a tensor's use and its hook",
        "capture/split.py",
        "first < leaf.start <= last for first",
        "last < leaf.start <= first for first",
        ("capture/test_hidden_effects.py",),
    ),
    Break(
        "capture: a removed hook counts as there",
        "capture/record.py",
        "(first, last if here else END)",
        "(first, last)",
        ("capture/test_hidden_effects.py",),
    ),
    Break(
        "capture: a parameter that is only looked at needs no placeholder",
        "capture/split.py",
        "(*record.reads, *record.looks)",
        "record.reads",
        ("capture/test_hidden_effects.py",),
    ),
    Break(
        "capture: a checkpoint is not blamed for a buffer",
        "capture/compare.py",
        'if what == "buffer" and checkpointed:',
        'if what == "output" and checkpointed:',
        ("capture/test_hidden_effects.py",),
    ),
    Break(
        "host store: a stage's part holds weights that another stage owns",
        "runtime/stage/host_store.py",
        "if id(tensor) in owned:",
        "if tensor is not None and id(tensor) not in {id(h) for h in module.handles.values()}:",
        ("capture/test_hidden_effects.py",),
    ),
    Break(
        "comparison: each part gets the attributes of the one before",
        "runtime/session/model_runner.py",
        "attributes.restore()",
        "attributes.list_changed()",
        ("runtime/test_carried_state.py",),
    ),
    Break(
        "comparison: replicas may have attributes of their own",
        "runtime/session/reference_run.py",
        "modules = self.runner.modules if is_split else self.runner.in_replicas",
        "modules = self.runner.modules if is_split else {}",
        ("runtime/test_carried_state.py",),
    ),
    Break(
        "comparison: a generator counts as something that is carried",
        "capture/preserve_state.py",
        "_Objects(values, generators=False)",
        "_Objects(values)",
        ("runtime/test_carried_state.py",),
    ),
    Break(
        "comparison: a buffer that replicas write is not blamed",
        "runtime/session/comparer.py",
        "self._explain_written() or _explain_gradient",
        "_explain_gradient",
        ("capture/test_hidden_effects.py",),
    ),
    Break(
        "capture: a region without autocast is left out",
        "capture/chain.py",
        "modes += [torch.autocast_increment_nesting(), torch.autocast_decrement_nesting()]",
        "torch.autocast_increment_nesting(), torch.autocast_decrement_nesting()",
        ("runtime/test_autocast.py",),
    ),
    Break(
        "capture: a conversion that matters under autocast is left out",
        "capture/chain.py",
        "(name in _CONVERSIONS and result is args[0])",
        "False",
        ("runtime/test_autocast.py",),
    ),
    Break(
        "autocast: the backward of an old graph reads the old cast",
        "runtime/stage/saved_tensors.py",
        "return _Cast(locator.find_slice(weight) or weight.data, tensor)",
        "return wrap_other(tensor)",
        ("runtime/stage/test_saved_tensors.py",),
    ),
    Break(
        "autocast: the forward reads rounded weights",
        "runtime/stage/stage_module.py",
        "self._expose_weights(leaves)",
        "self._expose_weights({name: leaf.to(self._autocast or leaf.dtype) for name, leaf in leaves.items()})",
        ("runtime/test_autocast.py",),
    ),
    Break(
        "capture: a tied parameter ties nothing",
        "capture/split.py",
        "groups = inseparable | {tuple(sorted(group)) for group in users.values() if len(group) > 1}",
        "groups = inseparable",
        ("capture/test_chain.py",),
    ),
    Break(
        "capture: a module with hooks is unfolded",
        "capture/chain.py",
        "return any(hooks) or any(",
        "return any(",
        ("capture/test_chain.py",),
    ),
    Break(
        "profiler: parameters that are alike are updated once",
        "profiler/update.py",
        "state_bytes += len(same) * _count_state_bytes(",
        "state_bytes += _count_state_bytes(",
        ("profiler/test_estimate.py",),
    ),
    Break(
        "metrics: the steady part counts one microbatch too many",
        "metrics.py",
        "finished = sum(end > ends[0] for end in ends)",
        "finished = sum(end >= ends[0] for end in ends)",
        ("test_metrics.py",),
    ),
    Break(
        "phases: a phase ends one minibatch late",
        "core/schedule/phase.py",
        "if not phase.is_over(minibatches, epochs)",
        "if not phase.is_over(minibatches - 1, epochs)",
        ("training/test_phases.py::test_phases_as_text",),
    ),
    # Meshes
    Break(
        "mesh: partial gradients are not added up at the update",
        "sharding/stage.py",
        "async_op=True) for total in late]",
        "async_op=True) for total in late[:0]]",
        ("sharding/test_mesh_training.py",),
    ),
    Break(
        "mesh: every rank counts a whole weight in the norm",
        "sharding/stage.py",
        "return not any(place for at, (placement, place) in placed if placement.is_replicate() and at not in sharded)",
        "return True",
        ("sharding/test_mesh_training.py",),
    ),
    Break(
        "mesh: a rank sends a piece that it does not have",
        "core/plan/mesh.py",
        "to_send.append(Piece(ranks[rank % len(ranks)], rank, part))",
        "to_send.append(Piece(rank % sender.size, rank, part))",
        ("core/test_meshes.py",),
    ),
    Break(
        "mesh: a rank draws the dropout mask of its part",
        "sharding/layers.py",
        "    return x.mul_(cut) if inplace else x * cut",
        "    return x * function(torch.ones_like(x), p)",
        ("sharding/test_mesh_training.py",),
    ),
    Break(
        "mesh: a collective makes a part contiguous",
        "sharding/functions.py",
        "part = put_in_order(result._local_tensor, order)",
        "part = result._local_tensor",
        ("sharding/test_local_rules.py",),
    ),
    Break(
        "mesh: a tensor from another stage counts as contiguous",
        "runtime/stage/stage_module.py",
        "crossing._replace(order=dimension_order(tensor))",
        "crossing._replace(order=tuple(range(tensor.dim())))",
        ("sharding/test_mesh_training.py",),
    ),
    Break(
        "mesh: a found layout computes the whole batch's gradient from a part",
        "layouts/layer.py",
        "        if have == target:\n            return part\n",
        "        if have == have:\n            return part\n",
        ("sharding/test_mesh_training.py",),
    ),
    Break(
        "mesh: a dimension that is cut twice has the first cut's part",
        "core/plan/mesh.py",
        "part = -(-len(box[cut]) // parts)",
        "part = -(-shape[cut] // parts)",
        ("core/test_meshes.py",),
    ),
    Break(
        "mesh search: a plan may take twice as long as its period",
        "planner/dynamic_program/mesh_program.py",
        "recompute)[cuts] <= period_s",
        "recompute)[cuts] <= 2 * period_s",
        ("planner/test_mesh_search.py",),
    ),
    # Operators and partitions
    Break(
        "partition: partial sums go to a whole as to a cut",
        "layouts/search/cost.py",
        "return (2 if to_whole else 1) * count_elements(source.whole)",
        "return count_elements(source.whole)",
        ("layouts/test_partition.py",),
    ),
    Break(
        "partition: later cuts count as the first",
        "layouts/search/partition.py",
        "return sum(2**at * cut.elements",
        "return sum(cut.elements",
        ("layouts/test_partition.py",),
    ),
    Break(
        "partition: ties are not followed",
        "layouts/search/partition.py",
        "_TIES = 256",
        "_TIES = 1",
        ("layouts/test_partition.py",),
    ),
    Break(
        "partition: a rank gets what it has",
        "layouts/search/exchanges.py",
        "for piece in pieces if piece.sender != piece.receiver)",
        "for piece in pieces)",
        ("layouts/test_partitioned.py",),
    ),
    Break(
        "partition: each rank's partial sum is the sum",
        "layouts/step.py",
        "into.copy_(COMBINE[reduction](into, part) if piece in written else part)",
        "into.copy_(part)",
        ("layouts/test_partitioned.py",),
    ),
    Break(
        "partition: a rank loses what it sends to itself",
        "sharding/functions.py",
        "arriving[my_rank].copy_(leaving[my_rank])",
        "arriving[my_rank].zero_()",
        ("sharding/test_functions.py",),
    ),
    Break(
        "partition: a description may leave an operand out",
        "layouts/tracing/registry.py",
        "present - named, named - present",
        "(), named - present",
        ("layouts/test_descriptions.py",),
    ),
    Break(
        "partition: ties are all drawn alike",
        "layouts/search/minimise.py",
        "random.choice(_find_tied(table, choice))",
        "min(_find_tied(table, choice))",
        ("layouts/test_minimise.py",),
    ),
    Break(
        "layouts by name: a tensor lives one operator too short",
        "layouts/description/named.py",
        "last.get(name, end - 1) + 1)",
        "max(starts.get(name, 0) + 1, last.get(name, end - 1)))",
        ("layouts/test_operators.py", "layouts/test_lay_out.py"),
    ),
    Break(
        "layouts by name: an all-reduce sends its slice once",
        "layouts/description/named.py",
        '(2 if kind == "all-reduce" else 1)',
        "1",
        ("layouts/test_operators.py", "layouts/test_lay_out.py"),
    ),
    Break(
        "report: a trace is in milliseconds",
        "report/trace.py",
        "return round(seconds * 1e6, 3)",
        "return round(seconds * 1e3, 3)",
        ("report/test_trace.py",),
    ),
    Break(
        "command: what is retired is refused only where it is an option",
        "cli/flags.py",
        """refuse_retired(f"{ctx.info_name} {param.opts[-1]}={ctx.params.get(param.name or '')}")""",
        "pass",
        ("cli/test_retired.py",),
    ),
    Break(
        "command: a wrong call ends as a failed run does",
        "cli/__init__.py",
        "status = 1 if isinstance(error, (WorkerError, OSError)) else BAD_CALL",
        "status = 1",
        ("cli/test_show_command.py", "cli/test_plan_command.py"),
    ),
    Break(
        "callbacks: an average is followed before the weights are evaluated",
        "callbacks.py",
        '            self.report(waits=name == "test_ema")',
        "            self.report()",
        ("test_callbacks.py",),
    ),
    Break(
        "callbacks: averages are not followed",
        "callbacks.py",
        'if name == "test" or (name == "test_ema" and "test" not in self._names):',
        'if name == "test":',
        ("test_callbacks.py",),
    ),
    Break(
        "pipeline: plain weights are given as averages",
        "pipeline.py",
        "    if ema and options.ema is None:",
        "    if False:",
        ("test_pipeline.py",),
    ),
    Break(
        "training: a frozen model trains",
        "runtime/session/training.py",
        "            if not any(tensor.requires_grad for tensor in tensors_in(inputs)):",
        "            if False:",
        ("test_pipeline.py",),
    ),
    Break(
        "hf: an ended epoch continues",
        "hf.py",
        "            pipeline._training.seek(self._epoch, 0)",
        "            pass",
        ("test_hf.py",),
    ),
    Break(
        "hf: a callback's rates are lost",
        "hf.py",
        "        if self.pipeline is not None and before != self._list_rates():",
        "        if False:",
        ("test_hf.py",),
    ),
    Break(
        "hf: the last update has all its batches or none",
        "hf.py",
        "            if not group:",
        "            if len(group) < steps:",
        ("test_hf.py",),
    ),
    Break(
        "hf: methods of a subclass are passed over",
        "hf.py",
        "    _refuse(refused, overridden)",
        "    _refuse(refused, set())",
        ("test_hf.py",),
    ),
    Break(
        "hf: input tokens are not counted",
        "hf.py",
        '        self.state.num_input_tokens_seen += int(inputs["tokens"])',
        "        pass",
        ("test_hf.py",),
    ),
    Break(
        "hf: a model stays in evaluation mode",
        "hf.py",
        "        trainer.model.train()  # as the plain Trainer does before each batch",
        "        pass",
        ("test_hf.py",),
    ),
    Break(
        "data: a stream's epochs start from its own number",
        "runtime/data/epochs.py",
        "            above = number - first\n",
        "            above = 0\n",
        ("training/test_habits.py",),
    ),
    Break(
        "comparison: only the buffers of a loss are its state",
        "runtime/session/model_runner.py",
        'find_values({"": self.loss.function}, (int, float), model_ids)',
        "{}",
        ("training/test_habits.py",),
    ),
    Break(
        "results: metrics write into what the backward needs",
        "runtime/results/scoring.py",
        "lambda tensor: tensor.detach().clone())",
        "lambda tensor: tensor.detach())",
        ("training/test_habits.py",),
    ),
    Break(
        "versions: hooks are called before they are refused",
        "runtime/stage/versions.py",
        "        self._check_hooks()  # before the comparison calls them\n",
        "",
        ("training/test_habits.py",),
    ),
    Break(
        "callbacks: early stopping without patience stops improvements",
        "callbacks.py",
        "max(self.patience, 1)",
        "self.patience",
        ("training/test_habits.py",),
    ),
    Break(
        "training: a stop in the last minibatch of a call is forgotten",
        "runtime/session/training.py",
        "        self.should_stop |= is_stopped\n",
        "        self.should_stop = False\n",
        ("training/test_habits.py",),
    ),
    # Comparisons
    Break(
        "compare: an interrupted run counts as complete",
        "training/compare_runs.py",
        '    if summary["interrupted"]:\n',
        "    if False:\n",
        ("training/test_comparing_delays.py",),
    ),
    Break(
        "compare: local SGD is measured without an average of its weights",
        "training/compare.py",
        "        if period > 1:  #",
        "        if period > 1000:  #",
        ("training/test_comparing.py",),
    ),
    Break(
        "compare: losses of data parallelism weigh each worker's part as the whole",
        "runtime/torch_baselines.py",
        "        samples = self._read_together * sum(size for *_, size in parts)\n",
        "        samples = sum(size for *_, size in parts)\n",
        ("training/test_comparing.py",),
    ),
)


def occurrences(case: Break) -> int:
    """Returns how often the text to be replaced occurs; 0 if the file does not exist."""
    path = ROOT / "src" / "pipedream" / case.file
    return path.read_text(encoding="utf-8").count(case.old) if path.exists() else 0


def _make_copies(folder: Path, count: int) -> Iterator[Path]:
    for number in range(count):
        copy = folder / str(number)
        copy.mkdir()
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "runs", "*.pt"))
            elif (ROOT / name).exists():
                shutil.copy(ROOT / name, copy / name)
        for profiles in (ROOT / "shared", *(above / "shared" for above in ROOT.parents)):
            if (profiles / "profiles").is_dir():
                (copy / "shared").symlink_to(profiles)
                break
        yield copy


def _run_tests(copy: Path, *arguments: str) -> str | None:
    """Runs pytest in a copy; returns which test failed first, or None if all passed.

    Raises:
        RuntimeError: pytest itself cannot run.
    """
    path = os.pathsep.join([str(copy / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "CI": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments]
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"nothing, but it did not end within {TIMEOUT_S:g} s"
    if done.returncode in (0, 5):  # 5: none of the tests is marked so
        return None
    failures = [line for line in done.stdout.splitlines() if line.startswith(("FAILED tests", "ERROR tests"))]
    if done.returncode not in (1, 2) or not failures:
        raise RuntimeError(f"pytest {' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return failures[0].split(" ", 1)[1].split(" - ")[0]


def _try(case: Break, copies: Queue[Path]) -> bool:
    """Applies a break to a free copy, runs the tests, and prints whether they notice; returns that."""
    copy = copies.get()
    path = copy / "src" / "pipedream" / case.file
    before = path.read_text(encoding="utf-8")
    start = time.monotonic()
    try:
        path.write_text(before.replace(case.old, case.new), encoding="utf-8")
        named, late = [f"tests/{test}" for test in case.tests], ""
        if (failed := _run_tests(copy, *named)) is None:
            late = "; by a marked test"
            failed = _run_tests(copy, *named, "-m", "slow and not long")
        if failed is None:
            late = "; the tests that are named with it passed"
            failed = _run_tests(copy, "-n", "2", *(f"--deselect={test}" for test in ABOUT_THE_SOURCE))
    finally:
        path.write_text(before, encoding="utf-8")
        copies.put(copy)
    seconds = f"{time.monotonic() - start:.0f} s"
    print(f"noticed     {case.name}: {failed} ({seconds}{late})" if failed else f"NOT NOTICED {case.name} ({seconds})")
    sys.stdout.flush()
    return failed is not None


def main() -> int:
    """Runs the script; returns its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="words of the names of the breaks to try [default: all]")
    parser.add_argument("--list", action="store_true", help="print the breaks and exit")
    parser.add_argument("--jobs", type=int, default=2, help="breaks that are tried at a time [default: 2]")
    options = parser.parse_args()
    chosen = [case for case in BREAKS if not options.names or any(word in case.name for word in options.names)]
    if not chosen:
        parser.error("no break has a name with one of these words; --list prints them")
    if options.list:
        for case in chosen:
            print(f"{case.name}\n    {case.file}: {case.old.strip()} -> {case.new.strip()}")
        return 0
    stale = [case for case in chosen if occurrences(case) != 1]
    for case in stale:
        print(
            f"STALE       {case.name}: its text occurs {occurrences(case)} times in src/pipedream/{case.file}, not once"
        )
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pipedream-breaks-") as folder:
        copies: Queue[Path] = Queue()
        for copy in _make_copies(Path(folder), options.jobs):
            copies.put(copy)
            if (error := _run_tests(copy, "--collect-only")) is not None:
                raise RuntimeError(f"{error} cannot be collected before anything is broken")
        with ThreadPoolExecutor(options.jobs) as pool:
            noticed = list(pool.map(lambda case: _try(case, copies), [case for case in chosen if case not in stale]))
    minutes = (time.monotonic() - start) / 60
    print(f"{sum(noticed)} of {len(chosen)} breaks were noticed, {len(stale)} are stale, in {minutes:.1f} minutes")
    return 0 if len(noticed) == len(chosen) and all(noticed) else 1


if __name__ == "__main__":
    sys.exit(main())
