"""Stand-ins for what the newest ComfyUI does otherwise than 0.3.75, put over the real 0.3.75 in a process of its own.

The newest host cannot be booted here: no package carries it. These parts are written from its public text, read in
November 2026 (github.com/Comfy-Org/ComfyUI, one file at a time, so each at a commit of its own):

    comfy/model_patcher.py 08d0e510f     comfy/ops.py 0271a469f       comfy/model_management.py 02b2b3886
    comfy/sd.py 033046cc4                comfy/model_base.py 094c74c1b

In words of our own, and only as far as the pack meets it:

- `dynamic_patcher.py`: the patcher of "dynamic VRAM", which casts each weight as a layer asks for it; what plain
  patchers have gained (`clone(disable_dynamic=...)`, `cached_patcher_init`, clones for a second GPU);
- `casting.py`: how a layer of such a patcher gets its weights: the file's, in the dtype noted on the layer, then in
  that of its input;
- `loading.py`: models whose weights are the file's own memory (mmap), in the file's dtype;
- `packed_weights.py`: weights that are not the numbers they store: quantized ones, GGUF-like ones;
- `install.py`: puts them in their places.

What is real: the networks, layers, samplers and memory management, all of 0.3.75. What is not: a GPU. The newest host
gives a plain patcher to whatever runs on a CPU; these stay dynamic there, since there is nothing else to run on. Also
not: memory that runs out while a model is in use, pinned memory, CUDA streams, graphs.
"""
