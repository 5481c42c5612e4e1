"""The modules that the run time loads."""

import subprocess
import sys

_HEAVY = ("pandas", "hydra", "omegaconf", "filelock", "tqdm", "pebble", "yaml", "pynvml")


def test_torch_triton_and_the_standard_library_alone() -> None:
    script = f"""
import sys, torch
before = set(sys.modules)
import gemmpipe.runtime, gemmpipe
assert not hasattr(torch.ops.gemmpipe, "product"), "registered at import"
assert not torch.cuda.is_initialized()
assert "torch._dynamo" not in sys.modules, "torch's compiler takes seconds to load"
x = torch.ones(2, 32).bfloat16()
gemmpipe.runtime.gemm_a16w16(x, x)
gemmpipe.patch(torch.nn.Linear(2, 2))
print(*(name for name in {_HEAVY} if name in sys.modules and name not in before))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
