"""Makes the embedded model that sees, in this order::

    python -m scripts.seeing.train RUN   # conserve/embedded/vision/; half an hour
    python -m scripts.seeing.evaluate    # 500 held-out screens, on vLLM

After a change of what is shipped, count up VISION_VERSION in conserve/embedded/__init__.py.
"""
