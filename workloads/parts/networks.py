"""Convolutional networks: the ResNets, AlexNet and VGG-19 of the papers, and a small one for made-up patterns."""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812 - torch's own custom
from torch import Tensor, nn


def conv_norm(inputs: int, outputs: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    """Return a convolution that keeps the resolution (or divides it by its stride), and its norm."""
    return [nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(outputs)]


class Block(nn.Module):
    """Two 3×3 convolutions with a residual connection; as a bottleneck 1×1, 3×3 and 1×1, which shrink and widen."""

    def __init__(self, inputs: int, width: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        self.outputs = 4 * width if bottleneck else width
        shapes = [(inputs, width, 3, stride), (width, width, 3, 1)]
        if bottleneck:
            shapes = [(inputs, width, 1, 1), (width, width, 3, stride), (width, self.outputs, 1, 1)]
        layers = [layer for shape in shapes for layer in (*conv_norm(*shape), nn.ReLU(inplace=True))]
        self.layers = nn.Sequential(*layers[:-1])
        same = inputs == self.outputs and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(*conv_norm(inputs, self.outputs, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's features, as many channels as `outputs`."""
        return F.relu(self.layers(x) + self.shortcut(x), inplace=True)


def resnet(bottleneck: bool, width: int, blocks: list[int], classes: int, small: bool) -> nn.Sequential:
    """Return stages of residual blocks, each with half the resolution and twice the channels of the one before."""
    # 32×32 pictures cannot afford to lose resolution before the first stage.
    layers = [*conv_norm(3, width, *((3, 1) if small else (7, 2))), nn.ReLU(inplace=True)]
    if not small:
        layers.append(nn.MaxPool2d(3, 2, 1))
    channels = width
    for stage, count in enumerate(blocks):
        for position in range(count):
            block = Block(channels, width * 2**stage, 2 if stage > 0 and position == 0 else 1, bottleneck)
            layers.append(block)
            channels = block.outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


Layers = list[tuple[int, int, int] | int]


def stack(convolutions: Layers, grid: int, classes: int, small: bool) -> nn.Sequential:
    """Return convolutions one after the other, max pooling between some, and three large linear layers behind them."""
    layers: list[nn.Module] = []
    channels = 3
    for convolution in convolutions:
        if isinstance(convolution, int):
            layers.append(nn.MaxPool2d(convolution, 2))
            continue
        width, kernel, stride = (convolution[0], 3, 1) if small else convolution
        layers += [nn.Conv2d(channels, width, kernel, stride, (kernel - 1) // 2), nn.ReLU(inplace=True)]
        channels = width
    grid, hidden = (1, 512) if small else (grid, 4096)  # of 32×32 pictures hardly more than a point is left
    layers += [nn.AdaptiveAvgPool2d(grid), nn.Flatten(), nn.Linear(channels * grid**2, hidden)]
    layers += [nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(hidden, hidden)]
    return nn.Sequential(*layers, nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(hidden, classes))


# He et al., Deep Residual Learning for Image Recognition, 2015: bottlenecks, width, and blocks of each stage.
RESNETS = {
    "resnet18": (False, 64, [2, 2, 2, 2]),
    "resnet20": (False, 16, [3, 3, 3]),  # the paper's smallest for 32×32: light enough for two CPU cores
    "resnet34": (False, 64, [3, 4, 6, 3]),
    "resnet50": (True, 64, [3, 4, 6, 3]),
    "resnet101": (True, 64, [3, 4, 23, 3]),
    "resnet152": (True, 64, [3, 8, 36, 3]),
}
# Width, kernel and stride of each convolution, and between them the window of each max pooling; then the grid of points
# that the linear layers see. Most of the weights are theirs: many bytes to exchange for little computing.
ALEXNET: Layers = [(64, 11, 4), 3, (192, 5, 1), 3, (384, 3, 1), (256, 3, 1), (256, 3, 1), 3]
VGG19: Layers = [*[(64, 3, 1)] * 2, 2, *[(128, 3, 1)] * 2, 2, *[(256, 3, 1)] * 4, 2]
VGG19 += [*[(512, 3, 1)] * 4, 2] * 2
STACKS = {
    "alexnet": (ALEXNET, 6),  # Krizhevsky, One Weird Trick for Parallelizing Convolutional Neural Networks, 2014
    "vgg19": (VGG19, 7),  # Simonyan and Zisserman, Very Deep Convolutional Networks for Image Recognition, 2014
}


def build_model(name: str, classes: int, small: bool) -> nn.Module:
    """Return a new model of pictures (batch × 3 × height × width); `small` is the one for 32×32 pictures."""
    model = stack(*STACKS[name], classes, small) if name in STACKS else resnet(*RESNETS[name], classes, small)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):  # signals keep their size through many layers
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


def small_network(width: int, classes: int) -> nn.Sequential:
    """Return convolutions that halve the picture and double the width three times, and a linear layer."""
    layers: list[nn.Module] = []
    inputs = 3
    for outputs in (width, 2 * width, 4 * width):
        layers += [*conv_norm(inputs, outputs, 3), nn.ReLU(inplace=True)]
        layers += [*conv_norm(outputs, outputs, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
        inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))
