"""Data for supervised fine-tuning: by tool from unified trajectories, or from whole data sets.

Formats and orders are those of the public repositories ojo1996/VideoMultiAgents_HOEY
(scripts/build_sft_datasets.py) and ALikesToCode/CourseGPT-Pro-DSAI-Lab-Group-6
(prepare_vertex_tuning_dataset.py).
"""
