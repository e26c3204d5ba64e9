"""The sizes of the tensors of well-known models, from their published configurations."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shapes:
    """The parameters of a model: how many elements each tensor has."""

    title: str
    source: str
    sizes: tuple[int, ...]

    @property
    def elements(self) -> int:
        """All elements together."""
        return sum(self.sizes)


def gpt2() -> Shapes:
    """GPT-2 124M: vocabulary 50257, width 768, 12 blocks, 1024 positions, tied output."""
    width = 768
    block = [width, width, 3 * width * width, 3 * width, width * width, width, width, width]
    block += [4 * width * width, 4 * width, 4 * width * width, width]
    sizes = (50257 * width, 1024 * width, *block * 12, width, width)
    return Shapes("GPT-2 124M", "config.json of openai-community/gpt2 (Radford et al., 2019)", sizes)


def llama() -> Shapes:
    """Llama 3.2 1B: vocabulary 128256, width 2048, 16 blocks, 8 of 32 heads for keys, tied output."""
    width, keys, hidden = 2048, 512, 8192
    block = [width * width, keys * width, keys * width, width * width, *[hidden * width] * 3, width, width]
    sizes = (128256 * width, *block * 16, width)
    return Shapes("Llama 1.2B", "config.json of meta-llama/Llama-3.2-1B (Meta, 2024)", sizes)


def resnet50() -> Shapes:
    """ResNet-50: 3, 4, 6 and 3 blocks of three convolutions, each with the two vectors of its norm."""

    def convolution(channels_in: int, channels_out: int, width: int) -> list[int]:
        return [channels_in * channels_out * width * width, channels_out, channels_out]

    sizes = convolution(3, 64, 7)
    channels = 64
    for blocks, inner in ((3, 64), (4, 128), (6, 256), (3, 512)):
        outer = 4 * inner
        for i in range(blocks):
            sizes += convolution(channels, inner, 1) + convolution(inner, inner, 3)
            sizes += convolution(inner, outer, 1)
            if i == 0:  # the path beside the first block of a stage has to widen
                sizes += convolution(channels, outer, 1)
            channels = outer
    sizes += [channels * 1000, 1000]
    return Shapes("ResNet-50", "table 1 of He et al. (2016), as torchvision.models.resnet50", tuple(sizes))


def small() -> Shapes:
    """Many tensors so small that a step is all launches and overhead."""
    return Shapes("400 small tensors (821 k)", "no model: 400 tensors of 2052 elements", (2052,) * 400)


MODELS = {"gpt2": gpt2, "llama-1b": llama, "resnet50": resnet50, "small": small}
