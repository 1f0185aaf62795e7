"""The files of ONNX Runtime's `StatisticsSubscriber`: read, written, and converted to recordings."""
