"""Where the nodes of each workflow lie, and the notes beside them: rows of groups of columns of nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Node:
    """A node of the API file; a height where it needs room for a picture or text that comes when it runs."""

    id: int
    height: int | None = None
    width: int | None = None
    collapsed: bool = False

    def as_data(self) -> dict[str, Any]:
        return vars(self)


@dataclass(frozen=True)
class Note:
    """A yellow note, in Markdown."""

    title: str
    text: str
    height: int = 200
    width: int = 330

    def as_data(self) -> dict[str, Any]:
        return {"title": self.title, "note": self.text, "height": self.height, "width": self.width}


@dataclass(frozen=True)
class Group:
    title: str
    columns: list[list[Node | Note]]


Layout = list[list[Group]]

READ_ME = "Read me"

PICTURE = 320  # holds what comes when a node has run

PICTURES_NOTE = """\
**The pictures** are those in `input/ref2v_demo`. Put your own there, or name another folder inside `input`.

24 of them are held out: the refiner is measured on pictures that it has never seen. Pictures that look alike stay on \
one side.
"""

TRAIN_NOTE = """\
**About 6 minutes on 2 CPU cores**; the node shows the loss curve and held-out pictures in turn.

All files are in `output/refiners/ref2v_demo`: the refiner, `report.json`, `grid.png`.

Stopped? Queue it again and it goes on. Finished? It is used again at once. For a new run, give it another name.
"""

REFINE_NOTE = """\
**First run the workflow *train_refiner***: this one uses its refiner.

The base is a picture at a third of its resolution, enlarged again. In `ref2v_demo` the picture shown here was held \
out of training. Take any other with *choose file*.

Keep KSampler at 8 steps, euler, simple, cfg 1, **denoise 1**. To refine less, lower *strength* in Load Refiner.
"""

DETAILS_NOTE = """\
*lanczos* on the way down, because the host's *bicubic* does not smooth before it shrinks, and the refiner was not \
trained on the jagged edges that this leaves.
"""


def _make_base(first: int) -> Group:
    """The group that makes a base out of a picture: five nodes from `first` on, as in the API files."""
    picture, down, up, encode, original = (Node(first + i) for i in range(5))
    notes = [Note("Why lanczos", DETAILS_NOTE, height=150)]
    return Group("A base to refine", [[Node(picture.id, height=PICTURE), *notes], [down, up], [encode, original]])


def _results(first: int) -> Group:
    decode, save = Node(first), Node(first + 1, height=PICTURE)
    stitches = [Node(first + 2, collapsed=True), Node(first + 3, collapsed=True)]
    return Group("What came out", [[decode, *stitches], [save], [Node(first + 4, height=PICTURE, width=800)]])


_BUILD_AND_TRAIN = [
    Group(
        "1. Pairs of base and target",
        [
            [
                Node(1),
                Node(2),
                Note("The pictures", PICTURES_NOTE, height=170),
                Note("Training", TRAIN_NOTE, height=180),
            ],
            [Node(3, height=640)],
            [Node(5, height=640, width=420)],
        ],
    ),
    Group(
        "2. Train",
        [
            [Node(4, height=640)],
            [Node(6, height=300, width=560), Node(7, height=300, width=560)],
        ],
    ),
]

LAYOUTS: dict[str, Layout] = {
    "train_refiner": [_BUILD_AND_TRAIN],
    "refine": [
        [
            _make_base(1),
            Group("Refine it", [[Note(READ_ME, REFINE_NOTE, height=260), Node(6), Node(7)], [Node(8)]]),
        ],
        [_results(9)],
    ],
    "train_and_refine": [
        _BUILD_AND_TRAIN,
        [
            _make_base(8),
            Group(
                "3. Refine with it",
                [
                    [
                        Note(
                            READ_ME,
                            "The path of the trained refiner comes over the link, so the list in Load Refiner does "
                            "not matter.\n\nThe picture was held out of training.",
                            height=140,
                        ),
                        Node(13),
                    ],
                    [Node(14)],
                ],
            ),
        ],
        [_results(15)],
    ],
    "refine_split": [
        [
            _make_base(1),
            Group(
                "Refine it in two runs of four steps",
                [
                    [
                        Note(
                            READ_ME,
                            "**First run the workflow *train_refiner*.**\n\nThe second half starts from a latent that "
                            "is no longer the base, so both halves get the base through *Refiner Conditioning*.\n\n"
                            "Adds noise: the first half only. Leftover noise: kept by the first half. The result "
                            "equals one run of 8 steps with the same seed.",
                            height=260,
                        ),
                        Node(6),
                        Node(7),
                        Node(8),
                    ],
                    [Node(9)],
                    [Node(10)],
                ],
            ),
        ],
        [_results(11)],
    ],
    "refine_custom_sampler": [
        [
            _make_base(1),
            Group(
                "Refine it with SamplerCustom",
                [
                    [
                        Note(
                            READ_ME,
                            "**First run the workflow *train_refiner*.**\n\n*Refiner Sigmas* gives the sigmas that "
                            "this very refiner was trained for. `deis`, `lms` and `heun` fit too; samplers that add "
                            "noise of their own (ancestral, SDE, lcm) are refused.",
                            height=190,
                        ),
                        Node(6),
                        Node(7),
                    ],
                    [Node(8), Node(9), Node(10)],
                ],
            ),
        ],
        [_results(11)],
    ],
    "train_from_model": [
        [
            Group(
                "1. Pairs of base and target",
                [
                    [
                        Node(1),
                        Node(2),
                        Note(
                            "The base",
                            "Each picture is noised a little (denoise 0.3) and denoised again by the base model. So "
                            "the refiner learns what *this* model loses. Set steps, cfg, sampler and scheduler as you "
                            "use them.\n\nCaptions: a `.txt` file of the same name beside each picture.",
                            height=230,
                        ),
                        Note(
                            "Training",
                            "*auto* takes half the width of SD 1.5 or SDXL: about a quarter of the parameters. This "
                            "needs a GPU.\n\nA refiner above 30 % of its base's size is refused, unless you allow it "
                            'with `{"refiner": {"allow_larger": true}}` in *options*.\n\nThen use it with the '
                            "workflow *generate_and_refine*.",
                            height=260,
                        ),
                    ],
                    [Node(3, height=640)],
                    [Node(5, height=640, width=420)],
                ],
            ),
            Group(
                "2. Train",
                [
                    [Node(4, height=640)],
                    [Node(6, height=300, width=560), Node(7, height=300, width=560)],
                ],
            ),
        ]
    ],
    "generate_and_refine": [
        [
            Group("The base", [[Node(1), Node(2, height=130), Node(3, height=130), Node(4)], [Node(5)]]),
            Group(
                "The refiner",
                [
                    [
                        Note(
                            READ_ME,
                            "**First train a refiner behind this base model**: the workflow *train_from_model*.\n\n"
                            "The base's LATENT goes straight into the second KSampler. Keep that one at 8 steps, "
                            "euler, simple, cfg 1, **denoise 1**.",
                            height=190,
                        ),
                        Node(6),
                    ],
                    [Node(7)],
                ],
            ),
        ],
        [
            Group(
                "What came out",
                [
                    [Node(8), Node(9), Node(11, collapsed=True)],
                    [Node(10, height=PICTURE, width=500)],
                    [Node(12, height=PICTURE, width=800)],
                ],
            )
        ],
    ],
    "train_from_pairs": [
        [
            Group(
                "1. Pairs of base and target",
                [
                    [
                        Node(1),
                        Node(2),
                        Note(
                            "The pictures",
                            "`input/my_pairs/before` holds what the refiner will be given, `input/my_pairs/after` what "
                            "it should make of it. A pair has one name (`fox.png` and `fox.jpg` are a pair) and shows "
                            "the same frame; the sizes may differ.",
                            height=190,
                        ),
                    ],
                    [Node(3, height=640)],
                    [Node(5, height=640, width=420)],
                ],
            ),
            Group(
                "2. Train",
                [[Node(4, height=640)], [Node(6, height=300, width=560), Node(7, height=300, width=560)]],
            ),
        ]
    ],
    "train_from_latents": [
        [
            Group(
                "1. Pairs of base and target",
                [
                    [
                        Node(1),
                        Node(2),
                        Node(3),
                        Note(
                            "The latents",
                            "Two files in `input`, saved with *SaveLatent*: what the refiner should make, and what it "
                            "is given, in the same order. Any number of channels; no VAE is needed, and the contact "
                            "sheet is in false colours then.",
                            height=170,
                        ),
                    ],
                    [Node(4, height=640)],
                    [Node(6, height=640, width=420)],
                ],
            ),
            Group(
                "2. Train",
                [[Node(5, height=640)], [Node(7, height=300, width=560), Node(8, height=300, width=560)]],
            ),
        ]
    ],
    "precision_audit": [
        [
            Group(
                "What does each dtype cost here?",
                [
                    [
                        Note(
                            READ_ME,
                            "Runs this checkpoint's VAE, CLIP and MODEL in FP32 and in the short dtypes, and says what "
                            "that costs: in dB, in colour (CIEDE2000), layer by layer. None of them is changed.\n\n"
                            "**Short of time or memory?** Link only what you want to know about, or a smaller picture. "
                            "On a CPU choose *bf16* alone: FP16 is many times slower there.\n\n"
                            "The host's loader may have rounded the VAE already; the report says so. Link *Load VAE "
                            "(Precision)* to measure the file itself.",
                            height=310,
                        ),
                        Node(2),
                        Node(1, height=PICTURE),
                    ],
                    [Node(3, height=360, width=440)],
                    [Node(4, height=860, width=700)],
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
                            "*Precision Plan* gives MODEL, CLIP and VAE their dtypes and says in a table what runs in "
                            "what, how large it is, and why. The models that come in stay as they are.\n\n"
                            "**recommended** is half precision where it costs nothing to see, and FP32 for the VAE "
                            "decoder. Link the *plan* of a Precision Audit, and what it found on your model counts."
                            "\n\nThe *NaN Guard* names the layer that gave a NaN, instead of a black picture.",
                            height=310,
                        ),
                        Node(1),
                    ],
                    [Node(2, height=420, width=560), Node(10, height=300, width=560)],
                    [Node(3)],
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
                        Node(2),
                    ],
                    [Node(3), Node(11, height=190, width=420)],
                    [Node(4), Node(12, height=190, width=420)],
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
                        Node(1, height=560),
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
                    [Node(2, height=480, width=760), Node(3, height=340, width=760)],
                ],
            ),
            Group(
                "A whole model: sampling, VAE, what fits",
                [
                    [
                        Node(7),
                        Node(8, height=480),
                        Note(
                            "What fits",
                            "Link `fitting_width`, `fitting_height` or `fitting_batch` to an Empty Latent Image. "
                            "LoRAs on the model are seen; a ControlNet can be connected.\n\nGrey is **assumed**, all "
                            "else is counted.",
                            height=170,
                        ),
                    ],
                    [Node(9, height=480, width=760), Node(10, height=340, width=760)],
                ],
            ),
        ],
        [
            Group(
                "1344x768 on SDXL",
                [
                    [Node(4, height=560)],
                    [Node(5, height=480, width=760), Node(6, height=340, width=760)],
                ],
            ),
            Group(
                "Training: optimizer, activations, several GPUs",
                [
                    [Node(11, height=520)],
                    [Node(12, height=480, width=760), Node(13, height=340, width=760)],
                ],
            ),
        ],
    ],
}
