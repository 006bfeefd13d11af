"""A stand-in for Ray that runs actors in this process, at once."""

import importlib
import os
from types import SimpleNamespace
from unittest import mock

import pytest

from megatron_ext.policy.ray import actors
from megatron_ext.policy.ray.liveness import ActorLocation


class RayError(Exception):
    pass


class RayTaskError(RayError):
    def __init__(self, cause):
        super().__init__("in an actor")
        self.cause = cause


class Answer:
    def __init__(self, value):
        self.value = value


class Method:
    def __init__(self, function):
        self.function = function

    def remote(self, *args):
        try:
            return Answer(self.function(*args))
        except RayError as died:
            return Answer(died)
        except Exception as error:
            return Answer(RayTaskError(error))


class RayAtOnce:
    """Ray's part in a group of actors; a result "never" does not come."""

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def __init__(self):
        self.killed, self.removed, self.needs, self.room = [], [], [], True

    def remote(self, cls):
        def options(**needs):
            self.needs.append(needs)
            actor = cls()
            names = ("where", "build", "call")
            methods = SimpleNamespace(**{name: Method(getattr(actor, name)) for name in names})
            return SimpleNamespace(remote=lambda: methods)

        return SimpleNamespace(options=options)

    def wait(self, asked, timeout):
        done = [one for one in asked if one.value != "never"]
        return done, [one for one in asked if one.value == "never"]

    def get(self, one):
        if isinstance(one.value, Exception):
            raise one.value
        return one.value

    def put(self, x):
        return x

    def kill(self, actor):
        self.killed.append(actor)

    def cluster_resources(self):
        return {"CPU": 1}


class Actor(actors._Actor):
    def where(self):
        self._store = None
        return ActorLocation("node", "host", 1), ("192.0.2.7", 29)

    def build(self, *args):
        with mock.patch.dict(os.environ):
            super().build(*args)


@pytest.fixture
def ray(monkeypatch):
    found = RayAtOnce()

    def group(bundles, strategy):
        return SimpleNamespace(bundles=bundles, wait=lambda timeout_s: found.room)

    monkeypatch.setattr(actors, "import_ray", lambda: found)
    monkeypatch.setattr(actors, "_Actor", Actor)
    monkeypatch.setattr(actors, "_GRACE_S", 0.05)
    module = importlib.import_module("ray.util.placement_group")
    monkeypatch.setattr(module, "placement_group", group)
    monkeypatch.setattr(module, "remove_placement_group", found.removed.append)
    return found
