"""Two Ray nodes on this machine, a rank on each; the second node's processes are all stopped during a call, as if that
host were frozen or its network cut: connections stay open, and nothing answers. Prints what is told, and when.

    python -m tests.policy.lost_host
"""

import os
import signal
import threading
import time

import psutil
import ray
from ray.cluster_utils import Cluster

from megatron_ext.policy import DTensorPolicyWorker, RayPolicy
from tests.policy.problems import tiny_config

START_S = 600


class Sleeper(DTensorPolicyWorker):
    def node(self):
        return ray.get_runtime_context().get_node_id()

    def sleep(self, seconds):
        time.sleep(seconds)


def main():
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_raylet_start_wait_time_s": "300", "RAY_USAGE_STATS_ENABLED": "0"}
    small = {"num_cpus": 1, "object_store_memory": 128 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=small)
    second = cluster.add_node(**small)
    ray.init(address=cluster.address, log_to_driver=False)
    policy = RayPolicy(tiny_config(), 2, Sleeper, start_timeout_s=START_S)
    nodes = policy._all("node")  # Ray decides which rank is where
    assert nodes.count(second.node_id) == 1, f"a rank on each node, not {nodes}"
    [raylet] = second.all_processes["raylet"]
    there = [psutil.Process(raylet.process.pid), *psutil.Process(raylet.process.pid).children(recursive=True)]
    stopped_at = []

    def stop():
        stopped_at.append(time.monotonic())
        for process in there:
            process.send_signal(signal.SIGSTOP)

    threading.Timer(5, stop).start()
    try:
        policy._all("sleep", 600)
    except RuntimeError as error:
        print(f"after {time.monotonic() - stopped_at[0]:.1f} s: {error}", flush=True)
    finally:
        for process in there:
            process.kill()
        os._exit(0)  # Ray would wait for the second node


if __name__ == "__main__":
    main()
