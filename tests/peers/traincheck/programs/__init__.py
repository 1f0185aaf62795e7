"""The 18 silent errors that TrainCheck lists, rebuilt in today's torch: one program each, healthy or faulty."""
