"""The demo: real weights, real prompts, every mode side by side."""
