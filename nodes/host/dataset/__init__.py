"""Building a dataset from the graph: pictures and a base source in, a folder of latent pairs out.

| file | what it holds |
|---|---|
| `request.py` | what the builder is asked for, and what it answers |
| `sources.py` | where base latents can come from (what the four base nodes give), and a pair made from one picture |
| `pictures.py` | where target pictures can come from: a folder or an IMAGE batch |
| `material.py` | both together: what pairs are made from |
| `latent_space.py` | how the host's raw latents are scaled into model space |
| `recipe.py` | everything the tensors depend on, hashed: the dataset's folder is named by it |
| `subsets.py` | folders such as `10_fox`, whose pictures have the weight 10 |
| `plan.py` | a look at a few pairs; which pictures become pairs, and on which side |
| `contact_sheet.py` | a few pairs as one picture |
| `report.py` | the words |
| `decoration.py` | contact sheet and report as files of the dataset, which can be made again |
| `writing.py` | the pairs of a plan on their way to the disk |
| `build.py` | one build, told from top to bottom |
"""
