"""What the paper compares with, each behind the protocol of `whence.attributor.Attributor`."""
