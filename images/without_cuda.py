"""Take CUDA out of an environment's PyTorch: `python without_cuda.py SITE_PACKAGES`. Needs gcc, nm and readelf.

The package index has PyTorch for Linux with CUDA alone. The loader opens its 5 GB of CUDA libraries at `import torch`,
although no CPU path calls them. Each one is replaced by a stub, which defines what the other libraries import from it:

- NVIDIA's C libraries return an error, which PyTorch handles (its profiler goes on without a device).
- PyTorch's own CUDA functions end the process with a sentence. They run only on tensors that are on a device.

libc10_cuda and libcudart stay (1.5 MB): they find no driver, so `torch.cuda.is_available()` is False.
A PyTorch without CUDA has nothing to replace and stays as it is.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

_TORCH_CUDA = "libtorch_cuda.so"
_BEHIND_IT = ("libtorch_cuda_linalg.so", "libtorch_nvshmem.so", "libcaffe2_nvrtc.so")
_KEPT = "libcudart.so"
_UNKNOWN_ERROR = 999
"""An error code in cuDNN, CUPTI and cuFile alike."""
_REGISTERS = "_ZN4c10d15get_gil_checkerEv"
"""Returns the place of a function pointer, which `import torch` writes to."""
_CONSTRUCTOR = re.compile(r"_Z(N.*)C[12]E")
_HEAD = """
#include <stdio.h>
#include <stdlib.h>
extern char _ZTVN10__cxxabiv117__class_type_infoE[];
static void fail_in(const char* function) {
  fprintf(stderr, "PyTorch of this image has no CUDA, but called %s: use the image with CUDA\\n", function);
  abort();
}
static void fail(void) { fail_in("a method"); }
static void nothing(void) {}
"""

Symbols = Mapping[str, tuple[str, int]]
"""Type (of nm) and size in bytes of each symbol."""


def exported(libraries: Iterable[Path]) -> dict[str, tuple[str, int]]:
    found = {}
    for library in libraries:
        for line in _output("nm", "-D", "--defined-only", "--print-size", library):
            *address_size, kind, name = line.split()
            found[name.partition("@")[0]] = kind, int(address_size[1], 16) if len(address_size) > 1 else 0
    return found


def imported(libraries: Iterable[Path]) -> set[str]:
    lines = (line for library in libraries for line in _output("nm", "-D", "--undefined-only", library))
    return {line.split()[-1].partition("@")[0] for line in lines}


def needed(libraries: Iterable[Path]) -> set[str]:
    lines = (line for library in libraries for line in _output("readelf", "-d", library))
    return {line.partition("[")[2].rstrip("]") for line in lines if "(NEEDED)" in line}


def stub(symbols: Symbols, *, is_torch: bool) -> str:
    """C source of a library with these symbols. Mangled C++ names are C identifiers."""
    lines = [_HEAD]
    for name, (kind, size) in sorted(symbols.items()):
        if name.startswith("_ZTI"):
            lines.append(f"void* {name}[{max(2, size // 8)}] = {_type_info(name[4:])};")
        elif name.startswith("_ZTV"):
            lines.append(f"void* {name}[{size // 8}] = {{0, 0, {_methods(size // 8 - 2)}}};")
        elif kind not in "TWi":
            lines.append(f"char {name}[{max(size, 8)}] __attribute__((aligned(16)));")
        elif not is_torch:
            lines.append(f"long {name}(void) {{ return {_UNKNOWN_ERROR}; }}")
        elif name == _REGISTERS:
            lines.append(f"void* {name}(void) {{ static void* place; return &place; }}")
        elif made := _CONSTRUCTOR.match(name):
            # `import torch` makes some as default arguments: objects whose type is known and whose methods fail.
            # The first three methods are two destructors and `intrusive_ptr_target::release_resources`.
            lines.append(
                f"void {name}(void** self) {{ static void* type[2] = {_type_info(made[1] + 'E')};"
                f" static void* table[34] = {{0, type, nothing, nothing, nothing, {_methods(29)}}};"
                f" *self = table + 2; }}"
            )
        else:
            lines.append(f'void {name}(void) {{ fail_in("{name}"); }}')
    return "\n".join(lines)


def _type_info(mangled: str) -> str:
    """Without bases: casts and pybind11, at import, compare names."""
    return f'{{_ZTVN10__cxxabiv117__class_type_infoE + 16, (void*)"{mangled}"}}'


def _methods(number: int) -> str:
    return ", ".join(["(void*)fail"] * number)


def take_out(site: Path) -> None:
    lib = site / "torch" / "lib"
    removed = [path for name in (_TORCH_CUDA, *_BEHIND_IT) if (path := lib / name).exists()]
    if not removed:
        return
    for path in site.glob(f"nvidia/*/lib/{_KEPT}*"):
        shutil.copy2(path, lib / path.name)
    kept = [path for path in lib.glob("*.so*") if path not in removed]
    users = [*kept, *site.glob("torch/_C*.so")]
    missing = imported(users) - exported(kept).keys()
    torch = {name: kind for name, kind in exported(removed).items() if name in missing}
    sources = {_TORCH_CUDA: stub(torch, is_torch=True)}
    for name in sorted(needed(users) - {path.name for path in kept}):
        if library := re.match(r"lib(cu\w+)\.so", name):
            own = {symbol for symbol in missing - torch.keys() if symbol.lower().startswith(library[1])}
            sources[name] = stub(dict.fromkeys(own, ("T", 0)), is_torch=False)
    for path in removed:
        path.unlink()
    for name, source in sources.items():
        _compile(source, lib / name)
    # What PyTorch says of its build decides which kernels it looks for.
    _edit(site / "torch" / "version.py", r"^cuda: .*$", "cuda: Optional[str] = None")
    not_built = r"""\g<0>\n\1sys.modules["torch._C"]._has_cuda = sys.modules["torch._C"]._has_cudnn = False
\1del sys.modules["torch._C"]._cuda_getDeviceCount"""
    _edit(site / "torch" / "__init__.py", r"^( *)from torch\._C import \*.*$", not_built)


def _edit(path: Path, pattern: str, replacement: str) -> None:
    text, times = re.subn(pattern, replacement, path.read_text(), flags=re.MULTILINE)
    assert times, f"{path} has no line {pattern}"
    path.unlink()  # it may be a hard link into a cache
    path.write_text(text)


def _compile(source: str, target: Path) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".c") as file:
        file.write(source)
        file.flush()
        _output("gcc", "-shared", "-fPIC", "-w", "-s", f"-Wl,-soname,{target.name}", "-o", target, file.name)


def _output(*command: str | Path) -> list[str]:
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()


if __name__ == "__main__":
    take_out(Path(sys.argv[1]))
