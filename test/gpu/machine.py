"""What this Python knows of CUDA here, as assignments for the shell that asks: test/gpu/run."""

import glob
import os
import shlex
import sys

facts = {"python_version": "Python %d.%d.%d" % sys.version_info[:3]}
folders = [os.path.join(path, "nvidia") for path in sys.path if path]


def newest(pattern):
    found = [path for folder in folders for path in glob.glob(os.path.join(folder, pattern))]
    return sorted(found)[-1] if found else ""


try:
    import torch

    root = os.path.dirname(torch.__file__)
    facts["torch_version"] = torch.__version__
    facts["torch_cuda"] = torch.version.cuda or ""
    facts["torch_abi"] = str(int(torch.compiled_with_cxx11_abi()))
    # Where the shim's build looks for lib and include.
    facts["torch_prefix"] = root if os.path.isfile(os.path.join(root, "include/torch/csrc/api/include/torch/torch.h")) else ""
    folders.insert(0, os.path.join(os.path.dirname(root), "nvidia"))
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name(0)
        facts["gpu_count"] = str(torch.cuda.device_count())
    else:
        facts["torch_lacks_gpu"] = "torch.cuda.is_available() is False"
except Exception as error:  # a torch that cannot be loaded is as good as none
    facts["torch_lacks"] = "%s: %s" % (type(error).__name__, str(error).splitlines()[0] if str(error) else "")

facts["wheel_cudart"] = newest("cu*/lib/libcudart.so.*")
facts["wheel_nccl"] = newest("nccl/lib/libnccl.so.2")
for name, value in facts.items():
    print("%s=%s" % (name, shlex.quote(value)))
