"""What a network is made of: kinds of layers and their gradient factors, found by looking at it."""
