"""NeMo-RL's functions in Ray's actors, replaced by the example's hook; NeMo-RL itself is a package made up for it."""

import pytest

from tests.examples import EXAMPLES
from tests.integrations.test_nemo_rl import write_package
from tests.programs import python

# As NeMo-RL starts Ray: with the driver's environment for every worker.
SCRIPT = """
import os, sys
import ray
environment = {"env_vars": dict(os.environ)}
ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, runtime_env=environment)

@ray.remote(runtime_env={"env_vars": {"OF_THE_ACTOR": "1"}})
class Worker:
    def highest(self):
        import torch
        from nemo_rl.distributed.early import vocab_parallel_argmax
        from megatron_ext.integrations import nemo_rl
        found = vocab_parallel_argmax(torch.tensor([[[0.0, 3.0, 1.0]]]))
        return found.tolist(), str(nemo_rl.report()), os.environ["OF_THE_ACTOR"]

print(*ray.get(Worker.remote().highest.remote()), sys.argv[1:])
"""


@pytest.mark.slow
def test_apply_runs_in_every_actor_of_an_unmodified_script(tmp_path, monkeypatch):
    pytest.importorskip("ray")
    write_package(tmp_path)
    (tmp_path / "run_grpo.py").write_text(SCRIPT)
    command = (str(EXAMPLES / "nemo_rl_on_ray.py"), str(tmp_path / "run_grpo.py"), "--config", "x.yaml")
    monkeypatch.setenv("PYTHONPATH", f"{EXAMPLES.parent}:{tmp_path}")
    done = python(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "[[1]] megatron_ext in nemo_rl" in done.stdout
    assert "vocab_parallel_argmax: in 1 module, ran 1 time" in done.stdout
    assert done.stdout.rstrip().endswith("1 ['--config', 'x.yaml']")
