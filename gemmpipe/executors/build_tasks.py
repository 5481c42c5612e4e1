"""Builds as tasks on a Ray cluster: once on every node that needs them in its cache."""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gemmpipe.data import Build, BuildFacts, Device
from gemmpipe.executors import Built, Usage
from gemmpipe.executors.seat import compile_there

if TYPE_CHECKING:
    from gemmpipe.executors.ray import Ray


class BuildTasks:
    """What is to be compiled on the nodes, and what of that is."""

    def __init__(
        self,
        *,
        executor: "Ray",
        device: Device,
        nodes: Sequence[str],
        environment: Mapping[str, Any],
        python_path: tuple[str, ...],
        began: float,
    ) -> None:
        """`nodes` are those that need the builds in their caches; one nameless one where all share a cache."""
        import ray

        self._ray: Any = ray
        self._executor = executor
        self._device = device
        self._nodes = nodes
        self._environment = environment
        self._python_path = python_path
        self._began = began
        self._waiting: deque[Build] = deque()
        self.running: dict[Any, Build] = {}
        """By Ray's reference of the task."""
        self._open: dict[str, int] = {}
        """By build id: on how many nodes it is not compiled yet."""
        self.usage = Usage(name="compile tasks")

    def submit(self, build: Build) -> None:
        """Queue a build."""
        self._waiting.append(build)
        self._open[build.id] = len(self._nodes)

    def forget_queued(self) -> None:
        """Drop the builds that are no task of the cluster's yet."""
        self._waiting.clear()

    def start_more(self) -> None:
        """Keep the cluster's cores busy."""
        if not self._waiting:
            return
        most = self._executor.compile_workers or int(self._ray.cluster_resources().get("CPU", 1))
        while self._waiting and len(self.running) < most:
            build = self._waiting.popleft()
            for node in self._nodes:
                options = {"num_cpus": 1, "max_retries": 2, "runtime_env": self._environment, **self._on(node)}
                reference = (
                    self._ray.remote(compile_there)
                    .options(**options)
                    .remote(build, self._device, self._executor.compile_timeout_s, self._python_path)
                )
                self.running[reference] = build

    def _on(self, node: str) -> dict[str, Any]:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=node, soft=False)} if node else {}

    def take(self, reference: Any) -> Built | None:
        """The build of a task that ended, when it is in every cache.

        One whose node is lost counts as compiled: it is left to the worker that needs it.
        """
        build = self.running.pop(reference)
        try:
            built: Built = self._ray.get(reference)
        except self._ray.exceptions.RayError:
            built = Built(build=build, facts=BuildFacts(compile_s=0.0, shared_bytes=None, registers=None, spills=None))
        self.usage.add({"compile": built.facts.compile_s})
        self.usage.wall_s = time.monotonic() - self._began
        self._open[build.id] -= 1
        return None if self._open[build.id] else built
