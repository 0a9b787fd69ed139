"""Where the nodes of the workflows that train and use a refiner lie, and the notes beside them."""

from __future__ import annotations

from layout import PICTURE, READ_ME, Group, Layout, Node, Note  # beside this file: `dev` itself is dev.py

PICTURES_NOTE = """\
**The pictures** are those in `input/ref2v_demo`. Put your own there, or name another folder inside `input`.

24 of them are held out: the refiner is measured on pictures that it has never seen. Pictures that look alike stay on \
one side.
"""

TRAIN_NOTE = """\
**About 6 minutes on 2 CPU cores**; the node shows the loss curve and held-out pictures in turn.

All files are in `output/refiners/ref2v_demo`: the refiner, `report.png`, `grid.png`.

Stopped? Queue it again and it goes on. Finished? It is used again at once. For a new run, give it another name.
"""

REFINE_NOTE = """\
**First run the workflow *train_refiner***: this one uses its refiner.

The base is a picture at a third of its resolution, enlarged again. In `ref2v_demo` the picture shown here was held \
out of training. Take any other with *choose file*.

**To refine a picture that is already at low resolution**, link it straight to *Up again (bicubic): the base* and set \
the size that you want there.

Keep KSampler at 8 steps, euler, simple, cfg 1, **denoise 1**. To refine less, lower *strength* in Load Refiner.
"""

# They show a picture and a text, below their inputs.
_BUILD, _TRAIN = Node(3, height=900, width=440), Node(4, height=980, width=560)

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


def _build_and_train(*options: Node) -> list[Group]:
    return [
        Group(
            "1. Pairs of base and target",
            [
                [
                    Node(1),
                    Node(2),
                    Note("The pictures", PICTURES_NOTE, height=170),
                    Note("Training", TRAIN_NOTE, height=180),
                ],
                [_BUILD],
            ],
        ),
        _train(*options),
    ]


def _train(*options: Node) -> Group:
    """The group that trains on the dataset of node 3."""
    loss = [Node(7, height=480, width=640)]
    return Group("2. Train", [*([[*options]] if options else []), [_TRAIN], loss])



LAYOUTS: dict[str, Layout] = {
    "train_refiner": [_build_and_train(Node(8, height=920))],
    "refine": [
        [
            _make_base(1),
            Group("Refine it", [[Note(READ_ME, REFINE_NOTE, height=330), Node(6), Node(7)], [Node(8)]]),
        ],
        [_results(9)],
    ],
    "train_and_refine": [
        _build_and_train(),
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
                    [_BUILD],
                ],
            ),
            _train(),
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
                    [_BUILD],
                ],
            ),
            _train(),
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
                    [Node(4, height=900, width=440)],
                ],
            ),
            Group(
                "2. Train",
                [[Node(5, height=980, width=560)], [Node(8, height=480, width=640)]],
            ),
        ]
    ],
}
