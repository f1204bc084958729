"""Data for supervised fine-tuning: by tool from unified trajectories, or from whole data sets.

    per_tool   trajectories -> a folder with train.jsonl and val.jsonl for each tool, by templates
    examples   a file or a data set of the hub -> rows; a row -> an example, or why it is dropped
    prepare    rows, or plans that a teacher wrote -> train.jsonl, validation.jsonl, test.jsonl and
               summary.json
    folder     a folder that is complete or absent; which rows are for training, by the seed

Formats and orders are those of the public repositories ojo1996/VideoMultiAgents_HOEY
(scripts/build_sft_datasets.py) and ALikesToCode/CourseGPT-Pro-DSAI-Lab-Group-6
(prepare_vertex_tuning_dataset.py).
"""
