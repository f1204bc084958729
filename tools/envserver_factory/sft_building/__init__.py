"""Data for supervised fine-tuning: by tool from unified trajectories, or from whole data sets.

    templates     a YAML file -> what a trajectory's action becomes: an instruction and an output
    per_tool      trajectories -> a folder with train.jsonl and val.jsonl for each tool
    examples      a file or a data set of the hub -> rows; a row -> an example, or why it is dropped
    router        a row of the router's -> an example, or why it is dropped
    prepare       rows -> train.jsonl, validation.jsonl, test.jsonl and summary.json
    generated     groups of plans that a teacher wrote -> rows, each plan once, balanced
    splits        which rows are for training: pure, deterministic in the seed
    folder        a folder that is complete or absent; rows that wait on disk

Formats and orders are those of the public repositories ojo1996/VideoMultiAgents_HOEY
(scripts/build_sft_datasets.py) and ALikesToCode/CourseGPT-Pro-DSAI-Lab-Group-6
(prepare_vertex_tuning_dataset.py).
"""
