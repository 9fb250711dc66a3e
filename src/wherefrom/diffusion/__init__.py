"""What a diffusion model is: its process, its network, its draws, its training and its sampling."""
