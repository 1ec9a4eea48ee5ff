"""The pictures of docs/dataflow.md, drawn from plans and configurations (see docs/draw_dataflow.py)."""
