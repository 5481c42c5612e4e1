"""Builds as tasks of a Ray cluster, compiled on its cores."""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from gemmpipe.core.data import Build, BuildFacts, Device
from gemmpipe.executors import BuildResult, Usage
from gemmpipe.executors.ray_worker import compile_on_node


class BuildTasks:
    """Builds as tasks on the cluster: each is compiled once per cache."""

    def __init__(
        self,
        *,
        slots: int | None,
        timeout_s: float,
        device: Device,
        nodes: Sequence[str],
        environment: Mapping[str, Any],
        python_path: tuple[str, ...],
        began: float,
    ) -> None:
        """`nodes` are the nodes that need the builds in their caches; [""] if all nodes share a cache.

        `slots`: concurrent builds; None: one per core of the cluster. `timeout_s`: seconds per build.
        """
        import ray

        self._ray: Any = ray
        self._slots, self._timeout_s = slots, timeout_s
        self._device = device
        self._nodes = nodes
        self._environment = environment
        self._python_path = python_path
        self._began = began
        self._waiting: deque[Build] = deque()
        self.running: dict[Any, Build] = {}
        """By Ray's reference of the task."""
        self._open: dict[str, int] = {}
        """Number of nodes on which a build is not compiled yet, by build id."""
        self.usage = Usage(name="compile tasks")

    def submit(self, build: Build) -> None:
        """Queue a build."""
        self._waiting.append(build)
        self._open[build.id] = len(self._nodes)

    def cancel_pending(self) -> list[Build]:
        """Drop the builds that are not tasks of the cluster yet, and return them."""
        dropped = list(self._waiting)
        self._waiting.clear()
        return dropped

    @property
    def slots(self) -> int:
        """Number of concurrent builds."""
        return self._slots or int(self._ray.cluster_resources().get("CPU", 1))

    @property
    def pending(self) -> int:
        """Number of unfinished builds, those with a task on several nodes counted once per task."""
        return len(self._waiting) + len(self.running)

    def start_more(self) -> None:
        """Start tasks for queued builds, up to the number of cores."""
        if not self._waiting:
            return
        most = self.slots
        while self._waiting and len(self.running) < most:
            build = self._waiting.popleft()
            for node in self._nodes:
                options = {"num_cpus": 1, "max_retries": 2, "runtime_env": self._environment, **self._placement(node)}
                task = self._ray.remote(compile_on_node).options(**options)
                self.running[task.remote(build, self._device, self._timeout_s, self._python_path)] = build

    def _placement(self, node: str) -> dict[str, Any]:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=node, soft=False)} if node else {}

    def take(self, reference: Any) -> BuildResult | None:
        """The result of a build if its last task has ended, else None.

        A build on a lost node counts as compiled: the worker that needs it compiles it.
        """
        build = self.running.pop(reference)
        try:
            built: BuildResult = self._ray.get(reference)
        except self._ray.exceptions.RayError:
            built = BuildResult(build=build, facts=BuildFacts(compile_s=0.0))
        self.usage.add({"compile": built.facts.compile_s})
        self.usage.wall_s = time.monotonic() - self._began
        self._open[build.id] -= 1
        return None if self._open[build.id] else built
