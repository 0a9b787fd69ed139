"""Colours as people see them: CIELAB (CIE 1976, D65) and the difference CIEDE2000."""

from __future__ import annotations

import numpy as np

# sRGB's primaries and white point D65, IEC 61966-2-1
_XYZ_OF_RGB = np.array([[0.412453, 0.357580, 0.180423], [0.212671, 0.715160, 0.072169], [0.019334, 0.119193, 0.950227]])
_WHITE = np.array([0.95047, 1.0, 1.08883])


def lab_of_rgb(rgb: np.ndarray) -> np.ndarray:
    """sRGB in [0, 1], [..., 3] -> L* 0..100, a*, b*."""
    linear = np.where(rgb > 0.04045, ((rgb + 0.055) / 1.055) ** 2.4, rgb / 12.92)
    xyz = linear @ _XYZ_OF_RGB.T / _WHITE
    x, y, z = np.moveaxis(np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116), -1, 0)
    return np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], -1)


def ciede2000(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The difference of colours in CIELAB, [..., 3] -> [...]; 1 is about what an eye can just tell apart.

    The names are those of Sharma, Wu & Dalal 2005, "The CIEDE2000 color-difference formula", with k_L = k_C = k_H = 1.
    """
    (L1, a1, b1), (L2, a2, b2) = (np.moveaxis(lab, -1, 0) for lab in (one, other))
    G = 0.5 * (1 - _chroma_weight((np.hypot(a1, b1) + np.hypot(a2, b2)) / 2))
    a1, a2 = (1 + G) * a1, (1 + G) * a2
    C1, C2 = np.hypot(a1, b1), np.hypot(a2, b2)
    h1, h2 = np.arctan2(b1, a1) % (2 * np.pi), np.arctan2(b2, a2) % (2 * np.pi)
    grey = C1 * C2 == 0  # has no hue

    dh = h2 - h1
    dh = np.where(grey, 0, dh - 2 * np.pi * np.sign(dh) * (np.abs(dh) > np.pi))
    dL, dC, dH = L2 - L1, C2 - C1, 2 * np.sqrt(C1 * C2) * np.sin(dh / 2)

    L, C, h = (L1 + L2) / 2, (C1 + C2) / 2, (h1 + h2) / 2
    around = np.where(h1 + h2 < 2 * np.pi, np.pi, -np.pi)  # the mean hue lies on the shorter way round
    h = np.where(grey, h1 + h2, h + around * (np.abs(h1 - h2) > np.pi))

    T = 1 - 0.17 * np.cos(h - np.radians(30)) + 0.24 * np.cos(2 * h)
    T += 0.32 * np.cos(3 * h + np.radians(6)) - 0.20 * np.cos(4 * h - np.radians(63))
    S_L = 1 + 0.015 * (L - 50) ** 2 / np.sqrt(20 + (L - 50) ** 2)
    S_C, S_H = 1 + 0.045 * C, 1 + 0.015 * C * T
    turn = np.radians(30) * np.exp(-(((np.degrees(h) - 275) / 25) ** 2))
    R_T = -2 * _chroma_weight(C) * np.sin(2 * turn)

    dL, dC, dH = dL / S_L, dC / S_C, dH / S_H
    return np.sqrt(np.maximum(dL**2 + dC**2 + dH**2 + R_T * dC * dH, 0))


def _chroma_weight(C: np.ndarray) -> np.ndarray:
    return np.sqrt(C**7 / (C**7 + 25.0**7))
