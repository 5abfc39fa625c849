"""Scripts that run in a process of their own, where `fla` must be absent, are not collected."""

collect_ignore_glob = ["hf_*.py", "run_hf.py"]
