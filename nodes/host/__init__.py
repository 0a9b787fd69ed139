"""The only place that touches the host (comfy.*, folder_paths, server): one host object a file."""
