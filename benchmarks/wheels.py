"""`python -m benchmarks.wheels FOLDER`: wheels of the peers that are measured on a GPU, to be copied there.

The wheels are fetched for Linux, Python 3.12 and CUDA 13, as one archive in parts of at most 52 MiB, since a machine
without a network may take no more at a time. `gpu_steps --wheels FOLDER` unpacks them there, in FOLDER/site.
"""

import argparse
import io
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

# The peers and their dependencies, without those that come with torch for CUDA.
PACKAGES = [
    "quack-kernels==0.6.5",
    "liger-kernel==0.8.5",
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-base",
    "nvidia-cutlass-dsl-libs-core",
    "nvidia-cutlass-dsl-libs-cu13",
    "apache-tvm-ffi",
    "torch-c-dlpack-ext",
    "einops",
    "protobuf",
]
PART_BYTES = 52 << 20


def fetch(folder: Path) -> list[Path]:
    """Download the wheels into `folder`, write the parts of their archive beside them, and return the parts."""
    wheels = folder / "wheels"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", "3.12", "--dest", str(wheels)]
    for platform in ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64"):
        command += ["--platform", platform]
    subprocess.run([*command, *PACKAGES], check=True)
    return pack(sorted(wheels.glob("*.whl")), folder)


def pack(wheels: list[Path], folder: Path) -> list[Path]:
    """Write an archive of `wheels` in parts, each in its own folder: `part-1/archive`, `part-2/archive` and so on."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as file:
        for wheel in wheels:
            file.add(wheel, wheel.name)
    whole, parts = archive.getbuffer(), []
    for number, at in enumerate(range(0, len(whole), PART_BYTES), 1):
        part = folder / f"part-{number}" / "archive"
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(whole[at : at + PART_BYTES])
        parts.append(part)
    return parts


def unpack(folder: Path, site: Path) -> list[str]:
    """Unpack the parts' wheels into `site`, a folder for `site.addsitedir`; return the names of the wheels."""
    parts = sorted(folder.glob("part-*/archive"), key=lambda part: int(part.parent.name.removeprefix("part-")))
    if not parts:
        raise FileNotFoundError(f"{folder} holds no part-1/archive: `python -m benchmarks.wheels {folder}` writes it")
    names = []
    with tarfile.open(fileobj=io.BytesIO(b"".join(part.read_bytes() for part in parts))) as file:
        for member in file.getmembers():
            content = file.extractfile(member)
            assert content is not None
            with zipfile.ZipFile(io.BytesIO(content.read())) as wheel:
                wheel.extractall(site)
            names.append(member.name)
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    for part in fetch(parser.parse_args().folder):
        print(f"{part}: {part.stat().st_size / (1 << 20):.0f} MiB")


if __name__ == "__main__":
    main()
