"""The two devices that segments are captured on, behind one protocol.

``cuda``      real CUDA graphs
``emulated``  any device: records without executing and replays on the addresses of capture
"""

from bcg_compiler.runtime.capture.cuda import CudaCapture
from bcg_compiler.runtime.capture.emulated import EmulatedCapture
from bcg_compiler.runtime.capture.protocol import CaptureDevice, CaptureError, Replay

__all__ = ["CaptureDevice", "CaptureError", "CudaCapture", "EmulatedCapture", "Replay"]
