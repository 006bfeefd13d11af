import os
import re
from pathlib import Path

from setuptools import find_packages, setup

# The version is written in one place, the package itself, which cannot be imported without torch.
VERSION = re.search(
    r'^__version__ = "(.+)"$', Path(__file__).with_name("megatron_ext").joinpath("__init__.py").read_text(), re.M
)

# The address of the repository, which whoever publishes the package sets.
REPOSITORY = os.environ.get("MEGATRON_EXT_REPOSITORY", "")

# Without psutil, which it does not ask for, Megatron-Core's dist_checkpointing.save() hangs.
MEGATRON = ["megatron-core>=0.14", "psutil"]
TRITON = "triton>=3.6"
GREENLET = "greenlet>=3"
SHOWN = ["tqdm>=4.60", "matplotlib>=3.8"]
RAY = ["ray>=2.40", "psutil"]
HF = ["transformers>=4.51,<6", "accelerate>=1.6", "safetensors"]
TRL = ["trl>=1.16", "datasets"]

setup(
    name="megatron-ext",
    version=VERSION[1],
    description="Fused lm head, tensor-parallel layers and log-probabilities for NVIDIA Megatron-Core",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    project_urls={"Source": REPOSITORY} if REPOSITORY else {},
    license_files=["LICENSE"],
    keywords=["megatron", "tensor parallelism", "cross entropy", "vocabulary parallel", "reinforcement learning"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.11",
    # With package_dir setuptools puts this folder on the path of an editable install. Its default, a finder, is asked
    # last: a script in the folder that holds the clone would import the clone itself, as a namespace package.
    package_dir={"": "."},
    packages=find_packages(include=["megatron_ext", "megatron_ext.*", "megatron_on_cpu", "megatron_on_cpu.*"]),
    package_data={"megatron_ext": ["py.typed"], "megatron_on_cpu": ["py.typed"]},
    install_requires=["torch>=2.10"],
    entry_points={"console_scripts": ["megatron-ext = megatron_ext.__main__:main"]},
    extras_require={
        "test": [*MEGATRON, "pytest>=8", "pytest-xdist>=3.6", "hypothesis>=6", "numpy", GREENLET],
        "examples": [*MEGATRON, GREENLET, *HF, *TRL, *RAY, *SHOWN, "tokenizers>=0.20", "filelock", "numpy"],
        "triton": [TRITON],
        "pipeline": [*MEGATRON, GREENLET],
        "te": ["transformer-engine[pytorch]>=2.0"],
        "hf": HF,
        "ray": RAY,
    },
)
