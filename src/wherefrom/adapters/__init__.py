"""Other people's models: diffusers pipelines, their schedulers, networks, latents and prompts."""
