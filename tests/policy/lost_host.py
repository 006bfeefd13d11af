"""Two Ray nodes, a rank on each; the second one answers nothing any more during a call. Prints what is told, and when.

    python -m tests.policy.lost_host frozen   all of its processes are stopped, as if that host were frozen
    python -m tests.policy.lost_host cut      it is in a network namespace of its own, whose cable drops every packet

Connections stay open in both. The second needs root on Linux, and ends with status 77 and the reason where it is
not permitted.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback

import psutil
import ray
from ray.cluster_utils import Cluster

from megatron_ext.policy import DTensorPolicyWorker, RayPolicy
from tests.policy.problems import tiny_config

START_S = 600
NOT_PERMITTED = 77
SMALL = {"num_cpus": 1, "object_store_memory": 128 << 20, "include_dashboard": False}
PORT = 6399  # nobody else is in the namespace
ADDRESSES = "10.213.7.1", "10.213.7.2"
CABLE = "eth0"  # its end in either namespace


class Sleeper(DTensorPolicyWorker):
    def node(self):
        return ray.get_runtime_context().get_node_id()

    def sleep(self, seconds):
        time.sleep(seconds)


def lose(second, take_away):
    """Calls a rank on each of the nodes, and takes the second away meanwhile."""
    policy = RayPolicy(tiny_config(), 2, Sleeper, start_timeout_s=START_S)
    nodes = policy._all("node")  # Ray decides which rank is where
    assert nodes.count(second) == 1, f"a rank on each node, not {nodes}"
    taken_at = []

    def take():
        taken_at.append(time.monotonic())
        take_away()

    threading.Timer(5, take).start()
    try:
        policy._all("sleep", 600)
    except RuntimeError as error:
        print(f"after {time.monotonic() - taken_at[0]:.1f} s: {error}", flush=True)


@contextlib.contextmanager
def ending_at_once(processes=()):
    """Ray would wait for the second node."""
    try:
        yield
    except BaseException:
        traceback.print_exc()
    for process in processes:
        process.kill()
    sys.stdout.flush()
    os._exit(0)


def freeze():
    cluster = Cluster(initialize_head=True, head_node_args=SMALL)
    second = cluster.add_node(**SMALL)
    ray.init(address=cluster.address, log_to_driver=False)
    [raylet] = second.all_processes["raylet"]
    there = []

    def stop():
        there.extend([psutil.Process(raylet.process.pid), *psutil.Process(raylet.process.pid).children(recursive=True)])
        for process in there:
            process.send_signal(signal.SIGSTOP)

    with ending_at_once(there):
        lose(second.node_id, stop)


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@contextlib.contextmanager
def two_namespaces():
    """Two network namespaces with a cable between them; what runs in them is ended with them."""
    names = [f"lost-host-{os.getpid()}-{end}" for end in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", CABLE, "netns", names[0], "type", "veth", "peer", "name", CABLE, "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", CABLE)
            for link in ("lo", CABLE):
                ip("-n", name, "link", "set", link, "up")
        yield names
    finally:
        for name in names:
            found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
            for process in map(int, found.stdout.split()):
                with contextlib.suppress(OSError):
                    os.kill(process, signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def cut():
    """Starts both hosts, each in its namespace, and this program as the driver on the first."""
    with contextlib.ExitStack() as stack:
        try:
            names = stack.enter_context(two_namespaces())
            for action in ("add", "del"):
                drop_all(names[0], action)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"a network cannot be cut here: {getattr(error, 'stderr', None) or error}")
            sys.exit(NOT_PERMITTED)
        folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        head = ["--head", f"--node-ip-address={ADDRESSES[0]}", f"--port={PORT}", "--include-dashboard=false"]
        start_ray(names[0], *head, f"--temp-dir={folder}")
        start_ray(names[1], f"--address={ADDRESSES[0]}:{PORT}", f"--node-ip-address={ADDRESSES[1]}")
        inside = [sys.executable, "-m", "tests.policy.lost_host", "driver", *names]
        subprocess.run(["ip", "netns", "exec", names[0], *inside], check=True)


def start_ray(namespace, *arguments):
    small = ["--num-cpus=1", f"--object-store-memory={128 << 20}", "--disable-usage-stats", "--log-style=record"]
    ray_command = [sys.executable, "-m", "ray.scripts.scripts", "start", *arguments, *small]
    subprocess.run(["ip", "netns", "exec", namespace, *ray_command], check=True, stdout=subprocess.DEVNULL)


def drop_all(namespace, action):
    """A queue of no packets: those that are to be sent are dropped."""
    queue = ["qdisc", action, "dev", CABLE, "root", "pfifo", *(["limit", "0"] if action == "add" else [])]
    subprocess.run(["tc", "-n", namespace, *queue], check=True, capture_output=True, text=True)


def drive(*names):
    ray.init(address=f"{ADDRESSES[0]}:{PORT}", log_to_driver=False)
    [second] = [node["NodeID"] for node in ray.nodes() if node["NodeManagerAddress"] == ADDRESSES[1]]

    def pull():
        for name in names:
            drop_all(name, "add")

    with ending_at_once():
        lose(second, pull)


if __name__ == "__main__":
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_raylet_start_wait_time_s": "300", "RAY_USAGE_STATS_ENABLED": "0"}
    os.environ |= {"GLOO_SOCKET_IFNAME": CABLE} if sys.argv[1] != "frozen" else {}
    {"frozen": freeze, "cut": cut, "driver": drive}[sys.argv[1]](*sys.argv[2:])
