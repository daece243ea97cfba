"""The memory that a process may take for its stages."""

import os

from pipedream.core.malloc import keep_freed_memory
from pipedream.runtime.comm.process_group import gather_json, read_machine
from pipedream.runtime.session.local_workers import LocalWorkers
from pipedream.services.probe.machine import available_bytes, host_bytes


def prepare_memory(workers_here: LocalWorkers) -> None:
    """Tells malloc what this process will need.

    Raises:
        PlanError: the machine has too little memory for what the plan keeps there.
    """
    blueprint, stages = workers_here.blueprint, workers_here.blueprint.program.plan.stages
    if blueprint.device.type == "cpu":
        share_bytes = host_bytes() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        peak_bytes = sum(stages[stage].peak_bytes for stage in workers_here.stages)
        keep_freed_memory(peak_bytes, min(available_bytes(blueprint.device, 1), share_bytes))
    _check_host_memory(workers_here)


def _check_host_memory(workers_here: LocalWorkers) -> None:
    blueprint, plan = workers_here.blueprint, workers_here.blueprint.program.plan
    stages, versions = plan.stages, None
    if blueprint.placement.shares_weights:
        rules = [program.weights for program in blueprint.programs]
        versions = [max(rule.versions(stage) for rule in rules) for stage in range(len(stages))]
    elif plan.choices.moves_activations or plan.choices.hosts_optimizers:
        rows = gather_json([read_machine(), list(workers_here.stages)], workers_here.group)
        stages = tuple(stages[s] for machine, stages_there in rows for s in stages_there if machine == read_machine())
    else:
        return
    plan.choices.check_machine(stages, host_bytes(), versions, blueprint.program.gradient_sets)
