"""PyTorch's side of checkpoint_python_test.rb.

write DIR   trains a little and saves, with torch.save, what the Ruby side loads: state dicts of models and of
            every optimizer, and the parameters after further steps
read DIR    reads a checkpoint of the Ruby side by its documented layout and prints its tensors as JSON
pieces DIR  the same of one in pieces
"""
import json
import os
import struct
import sys
import zlib

import torch

OPTIMIZERS = {
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.02),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.05),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
}

DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
          torch.float32, torch.float64, torch.complex64, torch.complex128]


def gradients(model, step):
    """The same numbers as on the Ruby side: no random generator is needed."""
    for i, parameter in enumerate(model.parameters()):
        numbers = torch.arange(parameter.numel(), dtype=torch.float32)
        parameter.grad = torch.sin(numbers * (i + 1) + step).reshape(parameter.shape)


def train(model, optimizer, steps):
    for step in steps:
        gradients(model, step)
        optimizer.step()


def write(folder):
    for name, make in OPTIMIZERS.items():
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
        optimizer = make(model.parameters())
        train(model, optimizer, range(3))
        torch.save({"model_state_dict": {"module." + k: v for k, v in model.state_dict().items()},
                    "optimizer_state_dict": optimizer.state_dict(), "epoch": 2, "global_step": 30, "loss": 0.25,
                    "note": ("é", None, True)}, os.path.join(folder, name + ".pt"))
        train(model, optimizer, range(3, 6))
        torch.save(model.state_dict(), os.path.join(folder, name + ".after.pt"))
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    tensors = {str(dtype)[6:]: (torch.arange(6) * 37 % 5).to(dtype) for dtype in DTYPES}
    tensors.update({"turned": base.t(), "gaps": base[1:, ::2], "scalar": torch.tensor(5), "empty": torch.zeros(0, 3),
                    "folded": torch.tensor([1.0, 2.0]).expand(3, 2), "parameter": torch.nn.Parameter(torch.ones(2)),
                    "size": base.size(), "large": 1 << 70, "negative": -5, "list": [1, [2.5, {"a": b"\x00\xff"}]]})
    torch.save(tensors, os.path.join(folder, "tensors.pt"))
    torch.save(base, os.path.join(folder, "bare.pt"))
    torch.save({"run": os.path.join}, os.path.join(folder, "function.pt"))
    torch.save(torch.nn.Linear(2, 2), os.path.join(folder, "module.pt"))
    torch.save({"w": base, "n": 3}, os.path.join(folder, "old.pt"), _use_new_zipfile_serialization=False)


def manifest_of(folder):
    with open(os.path.join(folder, "manifest.json"), "rb") as file:
        text = file.read()
    outer = json.loads(text)
    assert int(outer["crc32"], 16) == zlib.crc32(text[30:-2]), "the manifest's checksum"
    return outer["content"]


def read(folder):
    manifest = manifest_of(folder)
    found = {}
    for name, about in manifest["files"].items():
        with open(os.path.join(folder, name), "rb") as file:
            content = file.read()
        assert len(content) == about["bytes"]
        size = struct.unpack("<Q", content[:8])[0]
        assert int(about["header_crc32"], 16) == zlib.crc32(content[:8 + size])
        header = json.loads(content[8:8 + size])
        del header["__metadata__"]
        for tensor, row in header.items():
            begin, end = (8 + size + offset for offset in row["data_offsets"])
            place = manifest["tensors"][tensor]
            assert (place["offset"], place["bytes"]) == (begin, end - begin)
            assert int(place["crc32"], 16) == zlib.crc32(content[begin:end])
            dtype = getattr(torch, place["dtype"])
            flat = torch.frombuffer(bytearray(content[begin:end]), dtype=dtype) if end > begin else torch.empty(0, dtype=dtype)
            value = flat.reshape(place["shape"])
            value = torch.view_as_real(value) if value.is_complex() else value
            found[tensor] = [place["dtype"], value.double().tolist()]
    print(json.dumps(found))


def pieces(folder):
    manifest = manifest_of(folder)
    files = {name: open(os.path.join(folder, name), "rb").read() for name in manifest["files"]}
    found = {}
    for name, about in manifest["tensors"].items():
        dtype = getattr(torch, about["dtype"])
        tensor = torch.zeros(about["shape"], dtype=dtype)
        for piece in about["pieces"]:
            data = files[piece["file"]][piece["offset"]:piece["offset"] + piece["bytes"]]
            blocks = [data[at:at + manifest["block"]] for at in range(0, len(data), manifest["block"])]
            assert [int(crc, 16) for crc in piece["crc32"]] == [zlib.crc32(block) for block in blocks], name
            width = piece.get("width", piece["count"])
            rows = torch.frombuffer(bytearray(data), dtype=dtype).reshape(-1, width)
            tensor.view(-1).as_strided(rows.shape, (piece.get("stride", width), 1), piece["start"]).add_(rows)
        found[name] = tensor.double().tolist()
    print(json.dumps(found))


if __name__ == "__main__":
    {"write": write, "read": read, "pieces": pieces}[sys.argv[1]](sys.argv[2])
