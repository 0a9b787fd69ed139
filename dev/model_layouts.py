"""Where the nodes of the workflows about precision and memory lie, and the notes beside them."""

from __future__ import annotations

from layout import PICTURE, READ_ME, Group, Layout, Node, Note  # beside this file: `dev` itself is dev.py

LAYOUTS: dict[str, Layout] = {
    "precision_audit": [
        [
            Group(
                "What does each dtype cost here?",
                [
                    [
                        Note(
                            READ_ME,
                            "**Choose your checkpoint first.**\n\n"
                            "Runs this checkpoint's VAE, CLIP and MODEL in FP32 and in the short dtypes, and says what "
                            "that costs: in dB, in colour (CIEDE2000), layer by layer. None of them is changed.\n\n"
                            "**Short of time or memory?** Link only what you want to know about, or a smaller picture. "
                            "On a CPU choose *bf16* alone: FP16 is many times slower there.\n\n"
                            "The host's loader may have rounded the VAE already; the report says so. Link *Load VAE "
                            "(Precision)* to measure the file itself.",
                            height=360,
                        ),
                        Node(2),
                        Node(1, height=PICTURE),
                    ],
                    [Node(3, height=860, width=700)],
                ],
            ),
        ],
        [
            Group("The pictures", [[Node(5, height=560, width=760)], [Node(6, height=560, width=600)]]),
        ],
    ],
    "precision_plan": [
        [
            Group(
                "One node for the precision of a whole graph",
                [
                    [
                        Note(
                            READ_ME,
                            "**Choose your checkpoint first.**\n\n"
                            "*Precision Plan* gives MODEL, CLIP and VAE their dtypes and says in a table what runs in "
                            "what, how large it is, and why. The models that come in stay as they are.\n\n"
                            "**recommended** is half precision where it costs nothing to see, and FP32 for the VAE "
                            "decoder. Link the *plan* of a Precision Audit, and what it found on your model counts."
                            "\n\nThe *NaN Guard* names the layer that gave a NaN, instead of a black picture.",
                            height=360,
                        ),
                        Node(1),
                    ],
                    [Node(2, height=480, width=640)],
                    [Node(3, height=240)],
                ],
            ),
        ],
        [
            Group("Paint", [[Node(4), Node(5), Node(6)], [Node(7), Node(8)], [Node(9, height=PICTURE)]]),
        ],
    ],
    "vae_split_precision": [
        [
            Group(
                "One VAE, two precisions",
                [
                    [
                        Note(
                            READ_ME,
                            "One VAE, read once, in two precisions side by side: neither branch changes the other, and "
                            "nothing is restarted.\n\n*Load VAE (Precision)* reads the file's weights as they are; "
                            "choose your own file there, or link any other VAE into the two *Select VAE Precision*.\n\n"
                            "An encoder in BF16 costs little: its latent is noised anyway. The decoder gives the "
                            "picture itself, so it is worth FP32.",
                            height=270,
                        ),
                        Node(2, height=330, width=420),
                    ],
                    [Node(3, height=290, width=420)],
                    [Node(4, height=290, width=420)],
                ],
            ),
        ],
        [
            Group("A picture there and back", [[Node(1, height=PICTURE)], [Node(5), Node(6), Node(7)]]),
            Group(
                "What came out",
                [[Node(8, height=PICTURE), Node(9, collapsed=True)], [Node(10, height=PICTURE, width=700)]],
            ),
        ],
    ],
    "memory_768p": [
        [
            Group(
                "768x768 on SD1.5: the scores of one layer are larger than the model",
                [
                    [
                        Node(1, height=980, width=600),
                        Note(
                            READ_ME,
                            "Nothing is loaded and nothing is computed: queue it, it takes seconds.\n\n"
                            "`memory_gib` 8 plans for an empty GPU of 8 GiB; **0 asks this machine**. *backend* auto "
                            "is what this ComfyUI uses.\n\nConnect a MODEL, and its own layers are read. Link "
                            "`fitting_width` and `fitting_height` to an Empty Latent Image, and the graph takes the "
                            "largest size that fits.",
                            height=260,
                        ),
                    ],
                    [Node(2, height=480, width=760)],
                ],
            ),
            Group(
                "A whole model: sampling, VAE, what fits",
                [
                    [
                        Node(7),
                        Node(8, height=980, width=600),
                        Note(
                            "What fits",
                            "**Choose your checkpoint first**; without one only this part is skipped.\n\n"
                            "Link `fitting_width`, `fitting_height` or `fitting_batch` to an Empty Latent Image. "
                            "LoRAs on the model are seen; a ControlNet can be connected.\n\nGrey is **assumed**, all "
                            "else is counted.",
                            height=170,
                        ),
                    ],
                    [Node(9, height=480, width=760)],
                ],
            ),
        ],
        [
            Group(
                "1344x768 on SDXL",
                [
                    [Node(4, height=980, width=600)],
                    [Node(5, height=480, width=760)],
                ],
            ),
            Group(
                "Training: optimizer, activations, several GPUs",
                [
                    [Node(11, height=1040, width=600)],
                    [Node(12, height=480, width=760)],
                ],
            ),
        ],
    ],
}
