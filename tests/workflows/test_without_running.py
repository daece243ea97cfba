"""Models larger than the machine: profiled on the meta device and planned, by the door and by the command."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from commands import Refused, Run, load_script

import pipedream as pd

EXAMPLES = Path(__file__).parents[2] / "examples"
LLAMA = EXAMPLES / "llama70b.py"
PARAMETERS = 70_553_706_496  # as published for Llama 3 70B
# In one process, so that its peak is that of all: profile, plan without and with enough memory.
PROGRAM = """
import json, resource, sys
from pipedream.apps import cli
status = cli.main(["profile", sys.argv[1], "--device", "meta", "--as", "H100", "-o", "llama.json"])
plan = ["plan", "llama.json", "--workers", "8", "8", "--bandwidth", "450e9", "50e9", "--memory", "80GB"]
statuses = [status, cli.main(plan), cli.main([*plan, "--schedule", "1f1b", "-o", "plan.json"])]
usage = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({"statuses": statuses, "cpu_s": usage.ru_utime + usage.ru_stime, "peak_kib": usage.ru_maxrss}))
"""


@pytest.mark.slow
def test_blocks_of_the_llama_by_hand() -> None:
    llama = load_script(LLAMA).recipe()
    model = llama.model[:3].append(llama.model[-2]).append(llama.model[-1])  # two blocks
    profile = pd.profile(model, llama.train[0][0], device="meta", as_device="H100")
    rows = {layer.kind: cost for layer, cost in zip(profile.graph.layers, profile.layers, strict=True)}
    assert [layer.kind for layer in profile.graph.layers] == ["Embedding", "Block", "Block", "RMSNorm", "Linear"]
    dense = 8192 * (2 * 8192 + 2 * 1024 + 3 * 28672)
    block = rows["Block"]
    assert block.parameter_bytes == 2 * (dense + 2 * 8192)
    scores = 2 * 8192 * 4096**2 // 2  # flops of one product with the scores, below the diagonal
    assert block.forward_flops == 2 * dense * 4096 + 2 * scores
    assert block.backward_flops == 4 * dense * 4096 + 5 * scores
    assert block.output_bytes == 2 * 4096 * 8192
    assert 1.5e9 < block.activation_bytes < 2.1e9, "and no matrix of scores, which alone has 2.1 GB"
    # An H100 reaches 70% of 989 Tflop/s where all is products; norms and rotations take some more.
    assert block.forward_flops / 989.4e12 / 0.7 < block.forward_s < 1.3 * block.forward_flops / 989.4e12 / 0.7
    whole = 80 * block.parameter_bytes + sum(rows[kind].parameter_bytes for kind in ("Embedding", "RMSNorm", "Linear"))
    assert whole == 2 * PARAMETERS
    flops = 80 * (block.forward_flops + block.backward_flops) + 3 * rows["Linear"].forward_flops
    assert flops == pytest.approx(6 * PARAMETERS * 4096, rel=0.04)


@pytest.mark.long
def test_llama_is_profiled_and_planned_within_a_minute_and_4_gib(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(LLAMA)], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    usage = json.loads(done.stdout.splitlines()[-1])
    assert usage["statuses"] == [0, 2, 0]
    assert usage["cpu_s"] < 60
    assert usage["peak_kib"] < 4 * 2**20
    # Versions of the weights for all that is in flight: too much, and the planner says by how much.
    assert "fits" in done.stderr
    assert "a worker has 80.0 GB" in done.stderr
    profile = pd.Profile.load(tmp_path / "llama.json")
    assert profile.parameter_bytes == 2 * PARAMETERS
    assert profile.optimizer_bytes == 2 * 4 * PARAMETERS, "two moments in float32"
    assert profile.flops == pytest.approx(6 * PARAMETERS * 4096, rel=0.04)
    plan = pd.Plan.load(tmp_path / "plan.json")
    assert all(stage.peak_bytes <= 80e9 for stage in plan.stages)
    assert sum(stage.parameter_bytes for stage in plan.stages) == profile.parameter_bytes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--as A100", "--device cpu was given with --as A100"),
        ("--device meta --as abacus", "RTX-4090"),
        ("--device meta --as A100 --dtype int8", "bfloat16"),
        ("--device moon", "meta"),
    ],
)
def test_command_refuses(options: str, message: str, refused: Refused) -> None:
    assert message in refused("profile", EXAMPLES / "digits.py", *options.split())


@pytest.mark.slow
def test_command_plans_for_unlike_devices(tmp_path: Path, run_command: Run, refused: Refused) -> None:
    """A recipe of real tensors is profiled too, as another device, and its model is not run."""
    profile, out = tmp_path / "profile.json", tmp_path / "plan.json"
    options = ("--device", "meta", "--as", "V100", "--dtype", "float16", "-o", profile)
    printed = run_command("profile", EXAMPLES / "char_gpt.py", *options)[1]
    computed = pd.Profile.load(profile)
    assert "V100-16GB, not run" in printed
    assert "note: computed from flops and bytes" in printed
    assert (computed.dtype, computed.optimizer, computed.loss_s > 0) == ("float16", "AdamW", True)
    command = ("plan", profile, "--devices", "2xV100,1xRTX-4090", "-o", out)
    assert "V100-16GB" in run_command(*command, "--memory", "20GB")[1], "it says which stage is on which device"
    first, second = pd.Plan.load(out).cluster.kinds
    assert (first.count, first.device, first.speed, first.memory_bytes) == (2, "V100-16GB", 1.0, 16 * 10**9)
    assert (second.count, second.device, second.memory_bytes) == (1, "RTX-4090", 20 * 10**9)
    assert second.speed == pytest.approx(1008 / 900), "in float16 the bandwidths decide"
    assert "joins 4" in refused(*command, "--workers", "4")
    assert "RTX-4090" in refused("plan", profile, "--devices", "2xabacus")
    replace(computed, device="cpu: EPYC").save(profile)
    assert "datasheet" in refused("plan", profile, "--devices", "2xV100")
