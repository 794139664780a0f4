"""Compile and load shim.cpp, by which libtorch's CPU build believes in one CUDA device. Imports no torch."""

import ctypes
import hashlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_name("shim.cpp")
FOLDER = Path(__file__).resolve().parents[2] / "build/gpu_rehearsal"


def load():
    """Load the shim; torch asks for hooks when it is imported, so this comes first. Raises RuntimeError if late."""
    if "torch" in sys.modules:
        raise RuntimeError("the shim must be loaded before torch is imported")
    ctypes.CDLL(str(build()))


def build():
    """The shim as a library, compiled once for each torch (3 s). Raises CalledProcessError where g++ fails."""
    torch = Path(importlib.util.find_spec("torch").origin).parent
    key = hashlib.sha256(SOURCE.read_bytes() + (torch / "version.py").read_bytes() + str(torch).encode())
    library = FOLDER / f"{key.hexdigest()[:16]}.so"
    if library.exists():
        return library
    FOLDER.mkdir(parents=True, exist_ok=True)
    own = library.with_suffix(f".{os.getpid()}")  # ranks may compile at the same time
    options = ["-std=c++20", "-shared", "-fPIC", f"-I{torch}/include", f"-L{torch}/lib", f"-Wl,-rpath,{torch}/lib"]
    subprocess.run(["g++", *options, str(SOURCE), "-o", str(own), "-lc10", "-ltorch_cpu"], check=True)
    own.rename(library)
    return library
