"""A small convolutional network, for tests and for devices with little memory."""

from torch import nn

from accept_mpi.models.base import Chain
from accept_mpi.models.blocks import Classifier, conv_bn, positive, share


def cnn(classes: int = 10, channels: int = 3, width: int = 16, dropout: float = 0.1) -> Chain:
    """Five convolutions with batch norm, two of them halving the image, and a classifier: 8 layers.

    Images (n, channels, h, w) with h, w >= 4 -> scores (n, classes).
    """
    positive(classes=classes, channels=channels, width=width)
    share(dropout=dropout)
    return Chain(
        [
            ("conv1", lambda: conv_bn(channels, width)),
            ("conv2", lambda: conv_bn(width, width)),
            ("conv3", lambda: conv_bn(width, 2 * width, stride=2)),
            ("dropout1", lambda: nn.Dropout(dropout)),
            ("conv4", lambda: conv_bn(2 * width, 2 * width)),
            ("conv5", lambda: conv_bn(2 * width, 4 * width, stride=2)),
            ("dropout2", lambda: nn.Dropout(dropout)),
            ("classifier", lambda: Classifier(4 * width, classes)),
        ]
    )
