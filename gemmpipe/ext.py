"""The extension API, for users' families, backends, sources, searches, formats, executors and stages.

Everything here is public: names and signatures change with one version of notice. Importing this module loads
neither torch nor triton; names that need them are imported on first use.
"""

from typing import TYPE_CHECKING

from gemmpipe.backends import Backend
from gemmpipe.core.data import Bucket, Build, BuildFacts, Candidate, Device, Knobs, Problem, Scalar, Status, Trial
from gemmpipe.core.device import DeviceChoice
from gemmpipe.core.errors import EnvironmentProblem, GemmpipeError, NotComputed, UserError
from gemmpipe.core.events import Event, Events
from gemmpipe.core.spec import Experts, GemmSpec, Inputs, Scaling, Weights
from gemmpipe.family import (
    Family,
    Implementation,
    KernelDefaults,
    KeyColumn,
    Launch,
    Operands,
    Prepared,
    bytes_moved,
    flops,
    load_family,
)
from gemmpipe.family.aiter_table import AiterTable
from gemmpipe.family.dtypes import reject_bias
from gemmpipe.family.space import Space
from gemmpipe.formats import Format, Target
from gemmpipe.search import Search, SearchProblem, SearchSession, TrialRequest
from gemmpipe.search.history import History
from gemmpipe.search.simple import BatchSession, HalvingConfig, HalvingSession, RungLadder
from gemmpipe.sources import Source

if TYPE_CHECKING:
    from gemmpipe.backends.engine import EngineBackend as EngineBackend
    from gemmpipe.backends.engine import EngineImplementation as EngineImplementation
    from gemmpipe.bench.timer import Clock as Clock
    from gemmpipe.bench.timer import Timer as Timer
    from gemmpipe.executors import BuildResult as BuildResult
    from gemmpipe.executors import Executor as Executor
    from gemmpipe.executors import JobResult as JobResult
    from gemmpipe.executors import Pool as Pool
    from gemmpipe.executors import Usage as Usage
    from gemmpipe.family.operands import make_inputs as make_inputs
    from gemmpipe.family.operands import make_weights as make_weights
    from gemmpipe.family.reference import product as product
    from gemmpipe.family.reference import tolerance as tolerance
    from gemmpipe.launch.launch import KernelImplementation as KernelImplementation
    from gemmpipe.stages import Context as Context
    from gemmpipe.stages import Stage as Stage
    from gemmpipe.templates.constraints import tile_violation as tile_violation
    from gemmpipe.templates.device_fns import swizzle2d as swizzle2d
    from gemmpipe.templates.params import TRITON_TYPES as TRITON_TYPES
    from gemmpipe.templates.tiled import TiledKernel as TiledKernel

VALUES = [
    "AiterTable",
    "Bucket",
    "Build",
    "BuildFacts",
    "Candidate",
    "Device",
    "DeviceChoice",
    "Event",
    "Events",
    "Experts",
    "GemmSpec",
    "History",
    "Inputs",
    "Knobs",
    "Operands",
    "Prepared",
    "Problem",
    "Scalar",
    "Scaling",
    "Space",
    "Status",
    "Trial",
    "Weights",
]
"""Data types of all interfaces: problems, candidates, operands, devices, trials and their statuses."""

ERRORS = ["EnvironmentProblem", "GemmpipeError", "NotComputed", "UserError"]
"""Exceptions for user code: UserError for a usage error (exit code 2), EnvironmentProblem for the machine (3)."""

FAMILIES = [
    "Family",
    "Implementation",
    "KernelDefaults",
    "KernelImplementation",
    "KeyColumn",
    "Launch",
    "TRITON_TYPES",
    "TiledKernel",
    "bytes_moved",
    "flops",
    "load_family",
    "make_inputs",
    "make_weights",
    "product",
    "reject_bias",
    "swizzle2d",
    "tile_violation",
    "tolerance",
]
"""For the module of a family: its declaration, implementations, and tools for operands, references and kernels.

`TiledKernel` lists a space and launches a tiled Triton kernel; `swizzle2d` is a device function for such a kernel.
"""

BACKENDS = ["Backend", "EngineBackend", "EngineImplementation"]
"""Options of `backend`: libraries that compute products of several families, and functions of inference engines."""

SOURCES = ["Source"]
"""Options of `shapes`: providers of problems."""

SEARCHES = [
    "BatchSession",
    "HalvingConfig",
    "HalvingSession",
    "RungLadder",
    "Search",
    "SearchProblem",
    "SearchSession",
    "TrialRequest",
]
"""Options of `search`: the choice of candidates and of their launches; an ask/tell interface per problem."""

FORMATS = ["Format", "Target"]
"""Options of `format`: writers of artifacts that engines load."""

EXECUTORS = ["BuildResult", "Clock", "Executor", "JobResult", "Pool", "Timer", "Usage"]
"""Options of `executor` and `timer`: execution of jobs, and timing of launches."""

STAGES = ["Context", "Stage"]
"""Options of `stage`: the steps in the `chain` of a pipeline, which pass tables on."""

__all__ = [
    "TRITON_TYPES",
    "AiterTable",
    "Backend",
    "BatchSession",
    "Bucket",
    "Build",
    "BuildFacts",
    "BuildResult",
    "Candidate",
    "Clock",
    "Context",
    "Device",
    "DeviceChoice",
    "EngineBackend",
    "EngineImplementation",
    "EnvironmentProblem",
    "Event",
    "Events",
    "Executor",
    "Experts",
    "Family",
    "Format",
    "GemmSpec",
    "GemmpipeError",
    "HalvingConfig",
    "HalvingSession",
    "History",
    "Implementation",
    "Inputs",
    "JobResult",
    "KernelDefaults",
    "KernelImplementation",
    "KeyColumn",
    "Knobs",
    "Launch",
    "NotComputed",
    "Operands",
    "Pool",
    "Prepared",
    "Problem",
    "RungLadder",
    "Scalar",
    "Scaling",
    "Search",
    "SearchProblem",
    "SearchSession",
    "Source",
    "Space",
    "Stage",
    "Status",
    "Target",
    "TiledKernel",
    "Timer",
    "Trial",
    "TrialRequest",
    "Usage",
    "UserError",
    "Weights",
    "bytes_moved",
    "flops",
    "load_family",
    "make_inputs",
    "make_weights",
    "product",
    "reject_bias",
    "swizzle2d",
    "tile_violation",
    "tolerance",
]
_MODULES = {
    "BuildResult": "gemmpipe.executors",
    "Clock": "gemmpipe.bench.timer",
    "Context": "gemmpipe.stages",
    "EngineBackend": "gemmpipe.backends.engine",
    "EngineImplementation": "gemmpipe.backends.engine",
    "Executor": "gemmpipe.executors",
    "JobResult": "gemmpipe.executors",
    "KernelImplementation": "gemmpipe.launch.launch",
    "Pool": "gemmpipe.executors",
    "Stage": "gemmpipe.stages",
    "TRITON_TYPES": "gemmpipe.templates.params",
    "TiledKernel": "gemmpipe.templates.tiled",
    "Timer": "gemmpipe.bench.timer",
    "Usage": "gemmpipe.executors",
    "make_inputs": "gemmpipe.family.operands",
    "make_weights": "gemmpipe.family.operands",
    "product": "gemmpipe.family.reference",
    "swizzle2d": "gemmpipe.templates.device_fns",
    "tile_violation": "gemmpipe.templates.constraints",
    "tolerance": "gemmpipe.family.reference",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'gemmpipe.ext' has no attribute '{name}'", name=name)
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)
